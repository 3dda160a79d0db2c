"""Routes of other servers that are not here, and what their callers can do instead."""

from routes.http.errors import TEXT_ONLY

NO_EMBEDDINGS = "models that write text make no embeddings"
NO_RANKING = "models that write text do not rank others"
NO_MEDIA = TEXT_ONLY
NO_OBJECTS = "nothing of this kind is stored; send the texts with each request"
NO_BATCHES = "/v1/batches runs files of other requests; or send these at once"
NO_DOCUMENTS = "texts are translated and documents are not; send the texts of one"
NO_FILES = "models are not fetched or changed in this way; /loadmodel loads a file of the server"
GEMINI = "of Gemini's protocol nothing is served; ask /v1/chat/completions"
IN_ONE_PLACE = "/translate takes the bodies of all translators"
UNSERVED = {
    "/api/embed": NO_EMBEDDINGS,
    "/api/embeddings": NO_EMBEDDINGS,
    "/api/pull": NO_FILES,
    "/api/push": NO_FILES,
    "/api/create": NO_FILES,
    "/api/copy": NO_FILES,
    "/api/delete": NO_FILES,
    "/api/blobs": NO_FILES,
    "/embedding": NO_EMBEDDINGS,
    "/embeddings": NO_EMBEDDINGS,
    "/rerank": NO_RANKING,
    "/score": NO_RANKING,
    "/v1/embeddings": NO_EMBEDDINGS,
    "/v1/rerank": NO_RANKING,
    "/v1/score": NO_RANKING,
    "/v1/moderations": "this server does not moderate",
    "/v1/audio": NO_MEDIA,
    "/v1/images": NO_MEDIA,
    "/v1/videos": NO_MEDIA,
    "/v1/realtime": NO_MEDIA,
    "/v1/assistants": NO_OBJECTS,
    "/v1/threads": NO_OBJECTS,
    "/v1/conversations": "continue a response with previous_response_id",
    "/v1/vector_stores": NO_OBJECTS,
    "/v1/fine_tuning": "models are not trained here; /v1/adapters loads an adapter",
    "/v1/messages/batches": NO_BATCHES,
    "/v1/uploads": "/v1/files takes a file whole",
    "/v1/complete": "/v1/messages takes a conversation",
    "/v1beta": GEMINI,
    "/completion": "/v1/completions continues a text, and /infill what an editor asks for",
    "/generate": "/v1/completions continues a text",
    "/generate_stream": "/v1/completions continues a text, with stream",
    "/imme": IN_ONE_PLACE,
    "/kiss": IN_ONE_PLACE,
    "/hcfy": IN_ONE_PLACE,
    "/deeplx": IN_ONE_PLACE,
    "/v2/document": NO_DOCUMENTS,
    "/translate_file": NO_DOCUMENTS,
    "/v2/write": "texts are translated and not rephrased",
    "/v1/responses/compact": "a conversation of any length takes the same memory; send previous_response_id",
}


def of_other_servers(path: str) -> str | None:
    """Why a path is not served that other servers have; None: it is not known."""
    known = path.removeprefix("/openai") if path.startswith("/openai/") else path
    found = (why for start, why in UNSERVED.items() if known == start or known.startswith(f"{start}/"))
    return next(found, None)
