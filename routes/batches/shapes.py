"""Files and batches as OpenAI describes them."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: NotRequired[int]


class FileList(TypedDict):
    object: Literal["list"]
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchProblem(TypedDict):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchProblems(TypedDict):
    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    object: Literal["list"]
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
