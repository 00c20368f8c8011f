"""A stand-in for the HTTP interface of the Hugging Face hub, as far as huggingface_hub uses it for an upload.

It answers the requests of `create_repo`, `repo_info` and `upload_folder` with the Git LFS storage protocol (not Xet,
which the hub prefers), refuses all tokens except TOKEN, and keeps the uploads.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_right"


class Hub(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, bool] = {}  # name: whether it is private
        self.blobs: dict[str, bytes] = {}  # by SHA-256
        self.files: dict[str, bytes] = {}  # of commits
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, answer: dict, status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_PUT(self) -> None:
        body = self._body()
        self.server.blobs[hashlib.sha256(body).hexdigest()] = body
        self._answer({})

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/")
        if name not in self.server.repositories:
            return self._answer({"error": "Repository not found"}, 404)
        self._answer({"id": name, "private": self.server.repositories[name], "tags": [], "siblings": []})

    def do_POST(self) -> None:
        body, hub = self._body(), self.server
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            is_new = name not in hub.repositories
            hub.repositories.setdefault(name, asked.get("visibility") == "private")
            return self._answer({"url": f"{hub.url}/{name}"}, 200 if is_new else 409)
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            modes = [
                {"path": x["path"], "uploadMode": "lfs" if x["size"] > 100_000 else "regular", "shouldIgnore": False}
                for x in json.loads(body)["files"]
            ]
            return self._answer({"files": modes})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{hub.url}/blob/{entry['oid']}"}}
            return self._answer({"transfer": "basic", "objects": objects})
        for line in body.splitlines():  # a commit
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                hub.files[value["path"]] = hub.blobs[value["oid"]]
        name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        self._answer({"commitUrl": f"{hub.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40, "hookOutput": ""})
