"""Devices behind a command: another machine, a container or an emulator, of which only a Python is needed."""

from __future__ import annotations

import getpass
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import modelexport
from commands import run
from modelexport.errors import RunError, UsageError
from modelexport.runtime import runner_commands
from modelexport.runtime.devices import find_device
from modelexport.tools.devices.device_report import DeviceReport


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A product whose int8 weights saturate on processors without VNNI."""
    weights = np.full((64, 4), 127, np.int8)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["float_sum"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["float_sum", "scale"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [2, 64]), ("y", [2, 4])))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weights, "w")])
    path = tmp_path_factory.mktemp("through") / "product.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def there(product: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceReport, Path]:
    """What was found behind a command, and the folder for temporary files there."""
    folder = tmp_path_factory.mktemp("there")
    return modelexport.verify_on_device(product, device=f"cpu through env TMPDIR={folder}", keep=False), folder


def test_the_file_runs_behind_the_command(product: Path, there: tuple[DeviceReport, Path]) -> None:
    here = modelexport.verify_on_device(product, device="cpu", keep=False)
    assert there[0].agrees == here.agrees


def test_values_are_those_that_are_computed_there(product: Path) -> None:
    here, there = (modelexport.values(product, device=device).found for device in ("cpu", "cpu through env A=1"))
    assert [each.largest for each in there.ranges.values()] == [each.largest for each in here.ranges.values()]


def test_what_a_login_says_first_is_passed_over() -> None:
    assert find_device("cpu through sh -c 'echo Welcome to the board; exec \"$@\"' sh").provider.startswith("CPU")


def test_nothing_is_left_there(there: tuple[DeviceReport, Path]) -> None:
    assert [path for path in there[1].iterdir() if path.is_dir()] == []


FAILS = {
    "a program that is not there": ("no-such-program", "no-such-program cannot be started"),
    "a program that fails": ("sh -c 'echo permission denied >&2; exit 3'", "ended with status 3 .*permission denied"),
    "a program that is killed": ("sh -c 'kill -9 $$'", "ended with signal 9"),
    "a program that is no shell": ("true", "ended with status 0"),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_command_that_fails_is_one_line_with_its_last_words(name: str) -> None:
    command, said = FAILS[name]
    with pytest.raises(RunError, match=said) as raised:
        find_device(f"cpu through {command}")
    assert "\n" not in str(raised.value)


def test_a_command_that_does_not_answer_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_commands, "SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"does not begin \(not done after"):
        find_device("cpu through sh -c 'sleep 30'")
    assert time.monotonic() - began < 20


def _after_the_start(then: str) -> str:
    """A command whose Python tells that it is ready, and then does something else."""
    return f"cpu through sh -c 'echo {runner_commands.READY}; {then}' sh"


def test_a_command_that_takes_no_input_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_commands, "SECONDS", 0.5)
    monkeypatch.setattr(runner_commands, "SERVE", runner_commands.SERVE + "#" * (1 << 20))
    with pytest.raises(RunError, match=r"does not begin \(no input taken for 0.5 s\)"):
        find_device(_after_the_start("sleep 60"))


def test_a_command_that_closes_its_output_and_goes_on_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_commands, "LAST_SECONDS", 0.5)
    with pytest.raises(RunError, match="ended with signal 9 before it answered"):
        find_device(_after_the_start("exec >&- sleep 60"))


ANSWERS = """import sys
received = sys.stdin.buffer
received.readline()
print({ready!r}, flush=True)
received.read(int(received.readline()))
for job in received:
    is_asked = b'"facts"' in job
    facts = '{{"onnxruntime": "1", "platform": "there", "providers": ["CPUExecutionProvider"]}}'
    print(facts if is_asked else {answer!r}, flush=True)
"""


@pytest.mark.parametrize("answer", ['{"status": "ran"}', '{"errors": {"y": 0}}'])
def test_an_answer_without_a_comparison_is_no_agreement(answer: str, product: Path, tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(ANSWERS.format(ready=runner_commands.READY, answer=answer))
    with pytest.raises(UsageError, match="instead of a result"):
        modelexport.verify_on_device(product, device=f"cpu through python3 {tmp_path}/answers.py", keep=False)


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"has no device cuda; .*it has cpu"):
        find_device("cuda through env B=1")


def test_a_python_without_onnxruntime_is_said(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('there is no onnxruntime')")
    with pytest.raises(RunError, match=r"there is no onnxruntime.*it has to run Python 3 with numpy and onnxruntime"):
        find_device(f"cpu through env PYTHONPATH={tmp_path}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="Debian's package qemu-user is not installed")
def test_an_emulated_processor_without_vnni_saturates(product: Path) -> None:
    report = modelexport.verify_on_device(product, device="cpu through qemu-x86_64 -cpu Haswell", keep=False)
    assert not report.agrees


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """A command that reaches this machine through a server that listens on the loopback alone."""
    server = shutil.which("sshd")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("openssh is not installed")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\n"
        f"StrictModes no\nPidFile none\nUsePAM no\nPermitRootLogin yes\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([server, "-D", "-e", "-f", tmp_path / "config"], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        yield f"ssh {options} -p {port} -i {tmp_path}/user {shlex.quote(getpass.getuser())}@127.0.0.1"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_machine_is_reached_by_ssh(product: Path, ssh: str) -> None:
    done = run("verify", product, "--through", ssh)
    assert f"on cpu through {shlex.join(shlex.split(ssh))} " in done.stdout, done.stderr
