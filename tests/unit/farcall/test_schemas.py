"""The schemas in ``proto/``: their code is current, and they keep the rules that clients rely on."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PROTO = ROOT / "proto"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", PROTO / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def schemas(
    generate: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> list[descriptor_pb2.FileDescriptorProto]:
    described = generate.describe(tmp_path_factory.mktemp("schemas"))
    return [file for file in described.file if file.package.startswith("farcall.")]


def test_the_generated_code_is_current(generate: ModuleType, tmp_path: Path) -> None:
    generate.generate(tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2.py*")}
    committed = {path.relative_to(ROOT): path.read_text() for path in ROOT.glob("farcall/*/*_pb2.py*")}
    assert made == committed


def test_fields_keep_their_names_numbers_and_types(generate: ModuleType, tmp_path: Path) -> None:
    assert generate.numbers(generate.describe(tmp_path)) == (PROTO / "numbers.txt").read_text().splitlines()


def test_a_field_that_is_renumbered_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "proto"
    subprocess.run(["cp", "-r", str(PROTO), str(copy)], check=True)
    schema = copy / "farcall/v1/value.proto"
    schema.write_text(schema.read_text().replace("bytes data = 3;", "bytes data = 4;"))
    done = subprocess.run(
        [sys.executable, str(copy / "generate.py")], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "farcall.v1.Tensor.data = 3" in done.stderr


def test_packages_have_a_version_and_the_place_of_their_file(
    schemas: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    for file in schemas:
        assert re.fullmatch(r"farcall\.v\d+", file.package)
        assert str(Path(file.name).parent) == file.package.replace(".", "/")


def test_each_method_has_messages_of_its_own(schemas: list[descriptor_pb2.FileDescriptorProto]) -> None:
    services = [service for file in schemas for service in file.service]
    assert [service.name for service in services] == ["FarcallService", "WorkerService"]
    for method in (method for service in services for method in service.method):
        assert method.input_type == f".farcall.v1.{method.name}Request"
        assert method.output_type == f".farcall.v1.{method.name}Response"
