"""Exports of the table's models, made once for all tests and all workers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from filelock import FileLock

import models
from modelexport import export
from modelexport.capture import FrontEnd
from modelexport.cli.show_export import export_document
from modelexport.format import documents
from modelexport.verify.verify_report import VerifyReport


@dataclass(frozen=True)
class ExportedCase:
    """A case of the table and the files that its export wrote."""

    case: models.ModelCase
    path: Path
    document: dict[str, Any]
    """The output of ``modelexport export --verify --json``."""
    verified: VerifyReport
    """The verification of that export."""

    @property
    def hierarchy(self) -> documents.Hierarchy:
        return msgspec.json.decode(self.path.with_suffix(".hierarchy.json").read_bytes(), type=documents.Hierarchy)


Exporter = Callable[..., ExportedCase]


Shared = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Shared:
    """``shared(name, make)``: a folder that ``make`` fills once for all tests and all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with FileLock(base / f"{name}.lock"):
            if not done.exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def exported(shared: Shared) -> Exporter:
    """``exported(name, dynamic=False, frontend="dynamo")``: the verified export of a case, shared by all workers."""
    folder = shared("exports", lambda _: None)

    def get(name: str, *, dynamic: bool = False, frontend: FrontEnd = "dynamo") -> ExportedCase:
        case = models.case(name)
        if case.missing:
            pytest.skip(f"needs {', '.join(case.missing)}: `make test` installs them")
        path = folder / f"{name}{'-dynamic' if dynamic else ''}{'' if frontend == 'dynamo' else f'-{frontend}'}.onnx"
        document = path.with_suffix(".export.json")
        with FileLock(path.with_suffix(".lock")):
            if not document.exists():
                how: dict[str, Any] = {"frontend": frontend, "dynamic": dynamic, "check": dynamic}
                result = export(case.build(), case.inputs(), path, verify=True, **how)
                path.with_suffix(".verified").write_bytes(pickle.dumps(result.verified))
                document.write_text(json.dumps(msgspec.to_builtins(export_document(result))))
        verified = pickle.loads(path.with_suffix(".verified").read_bytes())
        return ExportedCase(case, path, json.loads(document.read_text()), verified)

    return get
