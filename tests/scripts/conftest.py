"""One cache folder for all runs of scripts, so that each step is compiled once."""

import pytest
import run_script


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    return run_script.make_chat_model(tmp_path_factory.mktemp("model") / "chat")
