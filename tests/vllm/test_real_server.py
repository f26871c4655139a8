"""Real vLLM servers: a dead EngineCore is noticed, and kill -9 of the trainer leaves no process and no file."""

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from processes import command_line, descendants, is_gone, wait_for
from transformers import Qwen3Config

HOLDER = """
import json, os, sys, time
from pathlib import Path
from lightning_ppo.rollout.vllm.config import VLLMConfig
from lightning_ppo.rollout.vllm.control import Control
from lightning_ppo.rollout.vllm.fleet import Fleet
from lightning_ppo.rollout.vllm.launch import SubprocessLauncher
from lightning_ppo.rollout.vllm.server_folder import temporary_variables

folder = Path(sys.argv[1])

def command(index, host, port, own):
    arguments = {
        "model": folder / "model", "host": host, "port": port, "dtype": "float32", "max-model-len": 64,
        "max-num-seqs": 4, "kv-cache-memory-bytes": 2**25, "load-format": "dummy", "served-model-name": "policy",
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    env = os.environ | temporary_variables(own, os.environ) | {
        "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1",
    }
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, *words, "--enforce-eager", "--skip-tokenizer-init"], env

def push(member):
    raise AssertionError("no weights were sent")

config = VLLMConfig(num_servers=2, max_restarts=0, probe_interval_s=0.5, start_timeout_s=180)
fleet = Fleet(config, SubprocessLauncher(config, command, folder / "logs"), Control, push)
fleet.start(lambda *line: print(json.dumps(line), flush=True))
print("up", flush=True)
while True:
    print(json.dumps([member.state for member in fleet.members()]), flush=True)
    time.sleep(0.2)
"""


def are_gone(processes):
    return all(is_gone(process.pid) for process in processes)


@pytest.mark.slow
def test_a_dead_engine_core_is_noticed_and_kill_9_of_the_trainer_leaves_nothing(tmp_path):
    model = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        architectures=["Qwen3ForCausalLM"],
    )
    model.save_pretrained(tmp_path / "model")
    # short enough for sockets
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    processes = []
    try:
        for line in holder.stdout:
            if line == "up\n":
                break
        logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
        assert line == "up\n", logs[-3000:]
        guards = psutil.Process(holder.pid).children()
        assert len(guards) == 2
        families = [descendants(command_line, guard) for guard in guards]
        processes = [*guards, *families[0], *families[1]]
        cores = [[child for child, line in family.items() if "EngineCore" in line] for family in families]
        assert [len(found) for found in cores] == [1, 1]
        os.kill(cores[0][0].pid, signal.SIGKILL)
        for line in holder.stdout:
            if sorted(json.loads(line)) == ["dead", "serving"]:
                break
        assert line, "the fleet ended"
        wait_for(lambda: are_gone(families[0]), f"the end of {families[0]}", 30)
        assert not any(is_gone(process.pid) for process in families[1])
        memory = {Path(used.path) for process in families[1] for used in process.memory_maps() if "/psm_" in used.path}
        assert any(path.exists() for path in memory)
        (used,) = temporary.glob("lightning_ppo-*")
        assert any(path.is_socket() for path in used.iterdir())
        holder.kill()
        holder.wait(10)
        wait_for(lambda: are_gone(processes), f"the end of {processes}", 30)
        assert {path.name for path in temporary.iterdir()} <= {f"torchinductor_{getpass.getuser()}"}
        assert not any(path.exists() for path in memory)
    finally:
        for process in [*processes, psutil.Process(holder.pid)] if holder.poll() is None else processes:
            if not is_gone(process.pid):
                process.kill()
        holder.wait(10)
        holder.stdout.close()
        shutil.rmtree(temporary)
