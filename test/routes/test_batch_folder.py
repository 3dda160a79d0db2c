"""The routes of files and batches while the disk takes long."""

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest
from robyn import Headers

from routes.batches import files, handlers
from routes.batches.folder import folder_of
from routes.http.errors import openai_shape
from routes.http.exchange import HttpRequest
from routes.http.frontend import Frontend
from rwkv_batch.batches import store as stores
from rwkv_batch.batches.store import BatchStore, file_of
from rwkv_batch.config import FrontendConfig

PATIENCE = 60.0  # seconds until what does not come is a failure
ENDPOINT = "/v1/completions"


def asked(path: str, method: str = "GET", body: dict[str, str] | None = None) -> HttpRequest:
    data = json.dumps(body) if body else ""
    return HttpRequest(method, path, "id", data, {}, Headers({}), time.monotonic(), 1 << 20, openai_shape)


def upload(store: BatchStore) -> str:
    return store.add_file(file_of("", "rows.jsonl"), lambda path: path.write_bytes(b"\n")).id


def test_other_requests_are_answered_while_the_disk_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the folder is asked for meanwhile: the event loop goes on, and all get their answers then."""
    front = Frontend(FrontendConfig(batch_dir=str(tmp_path)), None)
    writes, written, sync = threading.Event(), threading.Event(), stores.sync

    def slow(path: Path) -> None:
        if path == tmp_path:  # in the middle of a transaction
            writes.set()
            assert written.wait(PATIENCE), "nothing else has run"
        sync(path)

    async def all_of_them() -> list[int]:
        store = await folder_of(front)
        file, kept, gone = (upload(store) for _ in range(3))
        created = await handlers.create(
            front, asked("/v1/batches", "POST", {"input_file_id": file, "endpoint": ENDPOINT})
        )
        batch = json.loads(created.description)["id"]
        monkeypatch.setattr(stores, "sync", slow)
        uploaded = asyncio.create_task(asyncio.to_thread(upload, store))
        assert await asyncio.to_thread(writes.wait, PATIENCE)
        replies = [
            asyncio.create_task(reply)
            for reply in (
                files.list_(front, asked("/v1/files")),
                files.one(front, asked(f"/v1/files/{kept}")),
                files.one(front, asked(f"/v1/files/{gone}", "DELETE")),
                files.content(front, asked(f"/v1/files/{kept}/content")),
                handlers.list_(front, asked("/v1/batches")),
                handlers.one(front, asked(f"/v1/batches/{batch}")),
                handlers.create(
                    front, asked("/v1/batches", "POST", {"input_file_id": file, "endpoint": ENDPOINT})
                ),
                handlers.cancel(front, asked(f"/v1/batches/{batch}/cancel", "POST")),
            )
        ]
        await asyncio.sleep(0)  # each of them begins
        written.set()
        await uploaded
        return [reply.status_code for reply in await asyncio.gather(*replies)]

    assert asyncio.run(all_of_them()) == 8 * [200]
