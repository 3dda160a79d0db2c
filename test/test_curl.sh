#!/usr/bin/env bash
# Runs every curl of the README and of the pages of docs/ and prints one line each. Exit code 1 if any of them failed.
#
#   test/test_curl.sh                    starts a server with a password of its own
#   test/test_curl.sh URL [PASSWORD]     uses a running one, as in: test/test_curl.sh http://127.0.0.1:8000 rwkv7_7.2b
set -u
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
server=
trap '[ -n "$server" ] && kill "$server" && wait "$server"; rm -rf "$scratch"' EXIT

url=${1:-}
password=${2:-}
if [ -z "$url" ]; then
    password=rwkv7_7.2b
    # Below those that Linux gives to connections, so that none takes it before the server.
    port=$(python3 -c '
import random, socket
while True:
    port = random.randrange(10000, 32768)
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)):
            break
print(port)')
    url=http://127.0.0.1:$port
    python=.venv/bin/python
    [ -x "$python" ] || python=python3
    "$python" app.py --port "$port" --password "$password" --state-db "$scratch/sessions.db" --batch-dir "$scratch/batches" > "$scratch/log" 2>&1 &
    server=$!
    until [ "$(command curl -s -o /dev/null -w '%{http_code}' "$url/health")" = 200 ]; do
        kill -0 "$server" 2> /dev/null || { cat "$scratch/log"; server=; exit 1; }
        sleep 0.1
    done
fi

failed=0
curl() { # shadows the program: the same request, with the password, to the server under test
    local words=("${@//http:\/\/127.0.0.1:8000/$url}") out word target= status
    out=$(mktemp "$scratch/out.XXXXXX")
    for word in "${words[@]}"; do case $word in "$url"*) target=${word#"$url"} ;; esac; done
    status=$(command curl -sS -w '%{stderr}%{http_code}' ${password:+-H "Authorization: Bearer $password"} "${words[@]}" 2>&1 > "$out")
    if [ "${status:0:1}" = 2 ]; then
        printf 'ok    %s  %s\n' "$target" "$(head -c 100 "$out" | tr '\r\n' '  ')"
    else
        printf 'FAIL  %s  %s %s\n' "$target" "$status" "$(head -c 300 "$out" | tr '\r\n' '  ')"
        failed=1
    fi
}

sleep() { # shadows the program: until the request of the page that runs meanwhile has begun
    local listed
    for _ in {1..100}; do
        listed=$(command curl -sS ${password:+-H "Authorization: Bearer $password"} "$url/v1/server/status")
        [[ $listed != *'"request_id":"tale","rows"'* && $listed == *'"active_requests":'* ]] || return 0
        command sleep 0.1
    done
}

awk '/^```sh$/ {inside = 1; block = ""; next} /^```$/ {if (inside && block ~ /curl /) printf "%s", block; inside = 0} inside {block = block $0 "\n"}' \
    README.md docs/*.md > "$scratch/curls.sh"
count=$(grep -c '^curl ' "$scratch/curls.sh")
[ "$count" -gt 0 ] || { echo "README.md and docs/ have no curl"; exit 1; }
( cd "$scratch" && source "$scratch/curls.sh" && exit "$failed" ) || failed=1
exit "$failed"
