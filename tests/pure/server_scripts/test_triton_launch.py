"""Tests of which tritonserver is used and how it is started, on folders that look like an image's and like the
wheel's.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.settings.config import Config
from server_scripts import triton
from server_scripts.interpreter import VERSION
from server_scripts.processes import triton_spec
from server_scripts.run_dir import RunDir


@pytest.fixture
def image(tmp_path, monkeypatch):
    """Put a tritonserver on the PATH whose Python backend is for this Python."""
    binary = tmp_path / "image" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    python = tmp_path / "image" / "backends" / "python"
    python.mkdir(parents=True)
    (python / triton.BACKEND_UTILS).write_text("# of the image")
    (python / triton.STUB).write_text(f"libpython{VERSION}.so.1.0 numpy._core")
    monkeypatch.setenv("PATH", f"{binary.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "image"


@pytest.fixture
def no_wheel(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_the_tritonserver_of_an_image_wins(image):
    assert triton.find_tritonserver().binary == image / "bin" / "tritonserver"


def test_a_python_backend_for_another_python_is_named(image, no_wheel):
    (image / "backends" / "python" / triton.STUB).write_text("libpython3.9.so.1.0")
    with pytest.raises(
        triton.TritonError, match=rf"is for Python 3\.9, this is {VERSION}; the wheel with tritonserver"
    ):
        triton.find_tritonserver()


def test_without_any_tritonserver_both_places_are_named(no_wheel, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(triton.TritonError, match=r"no tritonserver on the PATH or at .*pip install"):
        triton.find_tritonserver()


def test_the_backend_folder_has_the_stub_and_the_stubs_library(image, tmp_path, monkeypatch):
    library = tmp_path / f"libpython{VERSION}.so.1.0"
    library.touch()
    monkeypatch.setattr(triton, "find_libpython", lambda: str(library))
    folder = tmp_path / "run"
    for _ in range(2):  # a second start finds the links of the first
        triton.prepare(triton.find_tritonserver(), folder, tmp_path / "repository")
    assert (folder / "backends" / "python" / triton.BACKEND_UTILS).read_text() == "# of the image"
    assert os.access(folder / "backends" / "python" / triton.STUB, os.F_OK)
    assert (folder / "lib" / library.name).resolve() == library


def test_a_start_leaves_folders_alone_that_are_not_its_own(image, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    (run_dir.path / "triton").mkdir()
    (run_dir.path / "triton" / "mine").touch()
    for _ in range(2):
        spec = triton_spec(Config(), os.environ, run_dir, tmp_path / "log")
    assert (run_dir.path / "triton" / "mine").exists()
    assert (spec.cwd / "backends").is_dir()


def test_a_stub_for_numpy_1_gets_our_utilities_under_numpy_2(image, tmp_path, monkeypatch):
    (image / "backends" / "python" / triton.STUB).write_text(f"libpython{VERSION}.so.1.0 numpy.core.multiarray")
    utilities = tmp_path / "run" / "backends" / "python" / triton.BACKEND_UTILS
    for version, is_ours in (("1.26.4", False), ("2.4.6", True)):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        triton.prepare(triton.find_tritonserver(), tmp_path / "run", tmp_path / "repository")
        assert (utilities.resolve().name == "backend_utils_numpy2.py") == is_ours
        assert utilities.with_name(f"original_{utilities.name}").exists() == is_ours


WITH_NUMPY_2 = """
import sys
import msgspec
import numpy as np
from tritonclient.grpc import service_pb2
from engine.wire.triton import payload_of
sys.path.insert(0, sys.argv[1])
import triton_python_backend_utils as utilities
for length in range(70):
    payload = msgspec.msgpack.encode("a" * length)
    items = utilities.serialize_byte_tensor(np.array([payload], np.object_))
    assert items.dtype.flags == items.dtype.itemsize  # the stub takes these flags for the size of an item
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.raw_output_contents.append(items.tobytes())
    assert msgspec.msgpack.decode(payload_of(response)) == "a" * length
"""


@pytest.mark.slow
def test_answers_of_a_stub_for_numpy_1_are_readable_under_numpy_2(tmp_path):
    package = importlib.util.find_spec("pytriton").submodule_search_locations[0]
    original = Path(package) / "tritonserver" / "backends" / "python" / triton.BACKEND_UTILS
    (tmp_path / triton.BACKEND_UTILS).symlink_to(triton.ROOT / "server_scripts" / "backend_utils_numpy2.py")
    (tmp_path / f"original_{triton.BACKEND_UTILS}").write_text("import struct\n" + serializer_of(original))
    done = subprocess.run(
        [sys.executable, "-c", WITH_NUMPY_2, tmp_path], cwd=triton.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def serializer_of(utilities):
    """Return Triton's function that serializes strings; the rest of its file needs the stub."""
    text = utilities.read_text()
    return text[text.index("def serialize_byte_tensor") : text.index("def deserialize_bytes_tensor")]


def test_the_stub_finds_this_interpreter_and_our_packages(image, tmp_path):
    env = triton.environment(triton.find_tritonserver(), tmp_path, {"PATH": "/bin", "OTHER": "kept"}, False)
    assert env["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/bin"
    assert env["LLM_SERVER_SYS_PATH"].split(os.pathsep)[0] == str(triton.ROOT)
    assert env["OTHER"] == "kept"


def test_tritonserver_sees_the_gpus_only_to_watch_them(image, tmp_path):
    found, config = triton.find_tritonserver(), Config()
    for watches, flag, seen in ((True, "true", "1"), (False, "false", "")):
        assert f"--allow-gpu-metrics={flag}" in triton.command(found, config, "prefix_", watches)
        assert (
            triton.environment(found, tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}, watches)["CUDA_VISIBLE_DEVICES"] == seen
        )


def test_the_command_carries_the_settings(image, tmp_path):
    config = Config(service_grpc_port=1, metrics_http_port=2, drain_timeout_s=7.5, service_host="127.0.0.1")
    found = triton.find_tritonserver()
    command = triton.command(found, config, "prefix_", False)
    assert command[0] == str(found.binary)
    for flag in (
        "--grpc-address=unix:grpc",
        "--grpc-port=1",
        "--metrics-address=unix:page",
        "--exit-timeout-secs=13",
        "--allow-http=false",
        "--model-repository=models",
        "--backend-config=python,shm-region-prefix-name=prefix_",
    ):
        assert flag in command
