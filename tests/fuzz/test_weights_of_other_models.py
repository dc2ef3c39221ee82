"""No command replaces or removes a file in which a model that it does not replace has its weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import commands
from modelexport.errors import OutputError
from modelexport.files.atomic_writing import replaced_together
from modelexport.files.linked_weights import free_place
from modelexport.files.output_folders import check_package_folder
from modelexport.files.replaceable_files import check_writable, signed
from modelexport.format.keys import DOCUMENT_SUFFIXES
from modelexport.format.package_manifest import MANIFEST, PACKAGE_VERSION, Manifest, encode_manifest


def model_with_data(path: Path, location: str, size: int = 32) -> Path:
    """A model whose one weight is in a file of its own, and that file."""
    weight = np.full((size, size), 0.5, np.float32)
    (path.parent / location).parent.mkdir(exist_ok=True)
    (path.parent / location).write_bytes(weight.tobytes())
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=weight.shape)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [tensor])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


def copied_model(folder: Path) -> None:
    shutil.copy(model_with_data(folder / "out.onnx", "out.onnx.data"), folder / "backup.onnx")


def renamed_model(folder: Path) -> None:
    model_with_data(folder / "out.onnx", "out.onnx.data").rename(folder / "backup.onnx")


def backup_with_another_suffix(folder: Path) -> None:
    shutil.copy(model_with_data(folder / "out.onnx", "out.onnx.data"), folder / "out.onnx.bak")


def model_in_the_folder_above(folder: Path) -> None:
    model_with_data(folder.parent / "backup.onnx", f"{folder.name}/out.onnx.data")


def backup_with_another_suffix_in_the_folder_above(folder: Path) -> None:
    model_in_the_folder_above(folder)
    (folder.parent / "backup.onnx").rename(folder.parent / "backup.onnx.bak")


def model_above_the_folder_that_the_folder_is_a_link_to(folder: Path) -> None:
    (folder.parent / "real").mkdir()
    folder.rename(real := folder.parent / "real" / "out")
    folder.symlink_to(real)
    model_in_the_folder_above(real)


def model_that_names_a_symbolic_link(folder: Path) -> None:
    model_with_data(folder / "backup.onnx", "out.onnx.data")
    (folder / "link.bin").symlink_to("out.onnx.data")
    model_with_data(folder / "backup.onnx", "link.bin")


def model_in_the_name_of_a_document(folder: Path) -> None:
    model_with_data(folder / "out.onnx", "out.onnx.data")
    model_with_data(folder / "backup.onnx", "out.dag.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_with_data(tmp_path / "in.onnx", "in.bin", 16)
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


OTHERS = [
    copied_model,
    renamed_model,
    backup_with_another_suffix,
    model_in_the_folder_above,
    backup_with_another_suffix_in_the_folder_above,
    model_above_the_folder_that_the_folder_is_a_link_to,
    model_that_names_a_symbolic_link,
    model_in_the_name_of_a_document,
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_an_output_whose_data_file_has_weights_of_another_model_is_refused(
    other: Callable[[Path], None], folder: Path
) -> None:
    other(folder)
    with pytest.raises(OutputError, match=r"holds weights of .*(backup|bak)"):
        check_writable(folder / "out.onnx")


@pytest.mark.parametrize("command", [["rename"], ["optimize", "--with", "ort-basic"], ["quantize", "--to", "float16"]])
def test_commands_leave_the_data_file_of_another_model(command: list[str], folder: Path) -> None:
    renamed_model(folder)
    before = (folder / "out.onnx.data").read_bytes()
    name, *options = command
    done = commands.run(name, folder.parent / "in.onnx", *options, "-o", folder / "out.onnx")
    assert (done.returncode, (folder / "out.onnx.data").read_bytes()) == (2, before)


def test_a_model_replaces_its_own_data_file(folder: Path) -> None:
    model_with_data(folder / "out.onnx", "out.onnx.data")
    done = commands.run("rename", folder.parent / "in.onnx", "-o", folder / "out.onnx")
    assert done.returncode == 0, done.stderr


def test_a_model_with_a_hard_link_to_the_data_file_loses_nothing_and_refuses_nothing(folder: Path) -> None:
    model_with_data(folder / "out.onnx", "out.onnx.data")
    model_with_data(folder / "backup.onnx", "backup.bin")
    (folder / "backup.bin").unlink()
    (folder / "backup.bin").hardlink_to(folder / "out.onnx.data")
    check_writable(folder / "out.onnx")


def test_weights_of_a_package_that_a_copy_of_its_part_has_are_not_replaced(folder: Path) -> None:
    shutil.copy(model_with_data(folder / "one.onnx", "model.safetensors"), folder / "backup.onnx")
    files = ["one.onnx", "model.safetensors"]
    manifest = Manifest(format_version=PACKAGE_VERSION, kind="whole", parts=[], weights=files[1:], files=files)
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    with pytest.raises(OutputError, match=r"holds weights of .*backup\.onnx"):
        check_package_folder(folder)


def test_a_model_that_was_copied_during_the_work_is_seen_before_files_are_moved(folder: Path) -> None:
    with pytest.raises(OutputError, match="holds weights of"), replaced_together() as replacement:
        model_with_data(replacement.folder(folder) / "out.onnx", "out.onnx.data")
        copied_model(folder)


def new_name(folder: Path) -> str:
    """The name of a weights file that is linked beside a model which has one of that name."""
    model_with_data(folder / "out.onnx", "out.model.safetensors")
    (folder / "new").mkdir()
    return free_place(folder / "out.onnx", folder / "new", folder.parent / "in.bin", "model.safetensors").name


def test_a_linked_weights_file_whose_bytes_are_nowhere_else_keeps_its_name(folder: Path) -> None:
    assert new_name(folder) == "out.2.model.safetensors"


def test_a_linked_weights_file_whose_bytes_have_another_name_is_replaced(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    (folder / "out.model.safetensors").hardlink_to(folder / "model.safetensors")
    assert new_name(folder) == "out.model.safetensors"


def test_a_linked_weights_file_with_the_same_bytes_is_replaced(folder: Path) -> None:
    model_with_data(folder.parent / "in.onnx", "in.bin")
    assert new_name(folder) == "out.model.safetensors"


def test_a_linked_weights_file_that_a_copy_of_the_model_has_keeps_its_name(folder: Path) -> None:
    model_with_data(folder.parent / "in.onnx", "in.bin")
    model_with_data(folder / "backup.onnx", "out.model.safetensors")
    assert new_name(folder) == "out.2.model.safetensors"


@pytest.mark.parametrize("suffix", DOCUMENT_SUFFIXES)
def test_a_file_of_a_person_with_the_name_of_a_document_is_not_replaced(suffix: str, folder: Path) -> None:
    (folder / f"out{suffix}").write_text('{"dag": "of another tool"}')
    with pytest.raises(OutputError, match="was not written by modelexport"):
        check_writable(folder / "out.onnx")


def test_source_code_that_a_person_changed_is_not_replaced(folder: Path) -> None:
    (folder / "out.py").write_bytes(signed(b"class Model: ...") + b"\n# mine")
    with pytest.raises(OutputError, match="was changed since"):
        check_writable(folder / "out.py", alone=True)


def test_source_code_with_other_ends_of_lines_is_replaced(folder: Path) -> None:
    (folder / "out.py").write_bytes(signed(b"class Model:\n    ...\n").replace(b"\n", b"\r\n"))
    check_writable(folder / "out.py", alone=True)
