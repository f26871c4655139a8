"""A stand-in for a vLLM server: `fake_server.py PORT [WORD...]`, with words for how it misbehaves from the start.

Served: /health, /info, /do/MOOD (good, bad, hang, die) and /weights/VERSION.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

SLEEP = "import time; time.sleep(120)"
mood, weights, child = "good", None, None


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global mood, weights
        path, _, value = self.path[1:].partition("/")
        if path == "do":
            mood = value
        elif path == "weights":
            weights = int(value)
        if mood == "die":
            os._exit(3)
        if path == "health" and mood == "hang":
            time.sleep(60)
        info = {
            "pid": os.getpid(),
            "child": child,
            "weights": weights,
            "cores": sorted(os.sched_getaffinity(0)),
            "env": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "FAKE")},
        }
        self.send_response(500 if path == "health" and mood == "bad" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(info).encode())

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    words = sys.argv[2:]
    if "ignore_term" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for word in words:
        if word in ("grandchild", "session"):
            child = subprocess.Popen([sys.executable, "-S", "-c", SLEEP], start_new_session=word == "session").pid
        if word.startswith("pids="):
            Path(word[5:]).write_text(json.dumps([os.getpid(), child]))
        if word.startswith("memory="):
            memory = SharedMemory(create=True, size=1000)
            Path(word[7:]).write_text(memory.name)
        if word.startswith("log="):
            print(Path(word[4:]).read_text(), flush=True)
        if word.startswith("exit="):
            sys.exit(int(word[5:]))
        if word.startswith("slow="):
            time.sleep(float(word[5:]))
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
