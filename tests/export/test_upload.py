"""--push, against a stand-in for the hub: what arrives, byte by byte, and what is refused."""

import sys
from pathlib import Path

import pytest

from common.errors import UserError

STAND_IN = Path(__file__).with_name("hub_stand_in.py")


@pytest.fixture
def hub(load_script, monkeypatch):
    """A hub that the library talks to, with its token, by the protocol of Git LFS."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    module = load_script(f"tests/export/{STAND_IN.name}")
    server = module.Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", module.TOKEN)
    _http.close_session()
    yield server
    _http.close_session()
    server.shutdown()
    server.server_close()


def test_every_byte_arrives_and_nothing_else(runs, export, tmp_path, hub, capsys):
    export(runs / "full", "--push", "me/small", "--private", "--output", "out")
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files.keys() == written.keys()
    assert hub.files == written
    assert written["model.safetensors"] in hub.blobs.values()  # by the storage protocol, the small ones in the commit
    assert hub.repositories == {"me/small": True}
    assert 'name = "me/small"' in written["README.md"].decode()
    assert f"uploaded to {hub.url}/me/small" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["token", "public", "network", "offline"])
def test_what_fails_is_told_and_the_export_kept(load_script, tmp_path, hub, monkeypatch, fault):
    load_script("export.py")
    push, is_private = sys.modules["exporting.upload"].push, False
    (tmp_path / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    if fault == "token":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        sentence = r"the hub refuses the token \(401\)"
    elif fault == "public":
        hub.repositories["me/small"], is_private = False, True
        sentence = "--private: me/small exists already, and is public; nothing was uploaded to it"
    elif fault == "network":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        sentence = r"the hub could not be used .*what was exported is complete.* hf upload me/small"
    else:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        sentence = r"the hub could not be used .*hf upload me/small"
    with pytest.raises(UserError, match=sentence):
        push(tmp_path, "me/small", is_private)
    assert hub.files == {}


def test_a_dry_run_needs_no_token_and_sends_nothing(runs, export, hub, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    export(runs / "full", "--push", "me/small", "--dry-run")
    printed = capsys.readouterr().out
    assert "these files would be uploaded to me/small" in printed
    assert "model.safetensors  7,285,456 bytes" in printed
    assert hub.repositories == {}
