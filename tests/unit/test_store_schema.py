"""Which databases are ours, and what brings them up to date."""

import pytest

from sdk_trio.errors import StoreVersionError
from sdk_trio.storage.sql.schema import APPLICATION_ID, MIGRATIONS, VERSION, plan_migration


def plan(application_id: int = APPLICATION_ID, version: int = VERSION, empty: bool = False):  # type: ignore[no-untyped-def] # statements
    return plan_migration(
        application_id=application_id, user_version=version, empty=empty, file="/data/inbox.db"
    )


def test_a_new_file_gets_every_step_and_both_marks() -> None:
    statements = plan(0, 0, empty=True)
    assert list(statements[:-2]) == [statement for step in MIGRATIONS for statement in step]
    assert statements[-2:] == (
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {VERSION}",
    )


def test_a_current_file_is_left_alone() -> None:
    assert plan() == ()


@pytest.mark.parametrize(
    ("application_id", "version", "empty"),
    [(0, 0, False), (0, 3, True), (12345, 0, True), (12345, VERSION, False)],
)
def test_what_another_program_wrote_is_refused(
    application_id: int, version: int, empty: bool
) -> None:
    with pytest.raises(StoreVersionError, match=r"/data/inbox.db.*another program.*Storage:Path"):
        plan(application_id, version, empty)


def test_a_newer_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(StoreVersionError, match="install the version that wrote it"):
        plan(version=VERSION + 1)
