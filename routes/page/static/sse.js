/** Server-sent events of a fetch response, as they come. */

/**
 * The JSON of each event until "[DONE]".
 * @param {Response} response
 * @returns {AsyncGenerator<any>} throws a TypeError if the stream ends before "[DONE]"
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let complete = false; // "[DONE]" has come
  let ended = false; // the response has ended
  try {
    for (;;) {
      const { value, done } = await reader.read();
      ended = done;
      if (done && complete) return;
      if (done) throw new TypeError("The stream ended early.");
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = dataOf(part);
        if (data === "[DONE]") complete = true;
        else if (data) yield JSON.parse(data);
      }
    }
  } finally {
    if (!ended) reader.cancel().catch(() => {});
  }
}

/** The data of one event; empty for a comment. */
function dataOf(part) {
  const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
