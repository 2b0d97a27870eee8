import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Known-answer verdicts of these tests never reach the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PORTATTN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=["cpu", "sdpa"])
def backend(request):
    """Each backend that this machine's CPU has."""
    if request.param == "cpu":
        request.getfixturevalue("cpu_kernels")
    return request.param
