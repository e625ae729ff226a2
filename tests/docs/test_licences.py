import re
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.docs.licences import LOCK, PAGE, licence, pinned


def test_a_lock_names_each_package_with_its_version() -> None:
    lock = "# made by\na-b==1.2 \\\n    --hash=sha256:0\nc.d[x,y]==3.0rc1 ; python_version < '3.12' \\\n"
    assert pinned(lock) == {"a-b": "1.2", "c.d": "3.0rc1"}


def test_every_pinned_package_states_a_licence_without_copyleft_of_the_whole() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = {
        name: text for name, _, text in re.findall(r"^\| `(.+)` \| (\S+) \| (.*) \|$", page, re.MULTILINE)
    }
    assert rows.keys() == pinned(LOCK.read_text(encoding="utf-8")).keys()
    assert [name for name, text in rows.items() if not text.strip()] == []
    assert [name for name, text in rows.items() if re.search(r"\b(A?GPL|SSPL|General Public)", text)] == []


def test_a_version_that_is_not_the_pinned_one_is_refused() -> None:
    assert licence("click", version("click")) == "BSD-3-Clause"
    with pytest.raises(ValueError, match=r"expected 0\.1: run `make setup`"):
        licence("click", "0.1")
    with pytest.raises(PackageNotFoundError):
        licence("no-such-package", "1")
