"""The supervisor's processes that write to databases."""

from pathlib import Path

from rwkv_batch.supervisor import Child, run_database


def test_why_a_database_cannot_be_used_is_known_once_its_process_has_ended(tmp_path: Path) -> None:
    child = Child("database", run_database, str(tmp_path), f"ipc://{tmp_path}/writer", True)
    refusal = child.refusal()
    child.close()
    assert refusal == f"{tmp_path} is a directory; name a file for the database."
