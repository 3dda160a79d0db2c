"""What reads the files of deploy/ has nothing to complain about."""

from collections.abc import Callable

import pytest
from tools import absent

from deploy import check


@pytest.mark.parametrize("checker", check.CHECKS, ids=lambda checker: checker.__name__)
def test_its_own_tool_reads_it(checker: Callable[[], str]):
    try:
        said = checker()
    except check.MissingTool as missing:
        absent(str(missing))
    assert not said, said
