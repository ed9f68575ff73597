"""A local server as a mirror of static models and as a hub, and an environment without a say of its own."""

import os

import pytest

from download_model import DownloadOptions
from tests.pure.download.models import CHECKPOINT, FAST, FOLDER, STATIC, UNNEEDED
from tests.pure.model_server import ModelServer


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch, tmp_path):
    """Hide settings in the environment, and the tokens of this machine."""
    for name in list(os.environ):
        if name.startswith("HF_") or name.lower().endswith("_proxy") or name in ("MODEL_MIRROR", "tag"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def server():
    with ModelServer() as running:
        yield running


@pytest.fixture
def mirror(server):
    server.add_folder(f"{FOLDER}/model", STATIC)
    return DownloadOptions(mirror=f"{server.url}/models/static", policy=FAST)


@pytest.fixture
def hub(server):
    server.add_repo("an-org/a-model", CHECKPOINT | UNNEEDED)
    return DownloadOptions(hub_endpoint=server.url, policy=FAST)
