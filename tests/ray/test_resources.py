import pytest

from lightning_ppo.errors import ConfigError
from lightning_ppo.rollout.ray.config import RayConfig
from lightning_ppo.rollout.ray.resources import check_fits, count_fitting, cpus_needed, describe, server_resources

NODES = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}]


@pytest.mark.parametrize(
    ("need", "node", "count"),
    [
        ({"CPU": 1}, {"CPU": 4}, 4),
        ({"CPU": 1, "GPU": 1}, {"CPU": 4, "GPU": 2}, 2),
        ({"CPU": 1, "slot": 1}, {"CPU": 4}, 0),
        # a tenth is no binary fraction
        ({"CPU": 0.1}, {"CPU": 0.3}, 3),
        ({"CPU": 0.0}, {"CPU": 0}, None),
        ({}, {"CPU": 2}, None),
    ],
)
def test_how_often_something_fits_into_a_node(need, node, count):
    assert count_fitting(need, node) == count


@pytest.mark.parametrize(("strategy", "most"), [("PACK", 3), ("SPREAD", 3), ("STRICT_PACK", 2), ("STRICT_SPREAD", 2)])
def test_the_strategy_decides_how_many_fit(strategy, most):
    need = {"CPU": 1.0, "GPU": 1.0}
    check_fits("vllm.num_servers", most, need, NODES, strategy)
    with pytest.raises(ConfigError) as caught:
        check_fits("vllm.num_servers", most + 1, need, NODES, strategy)
    message = str(caught.value)
    assert message.startswith(f"vllm.num_servers={most + 1} needs {most + 1} x (1 CPU, 1 GPU)")
    assert f"room for {most}: 6 CPU, 3 GPU on 2 nodes; " in message
    assert ("placement_strategy" in message) == strategy.startswith("STRICT")
    assert "\n" not in message


def test_a_server_does_not_span_nodes():
    check_fits("vllm.num_servers", 1, {"CPU": 6.0}, [{"CPU": 6.0}])
    with pytest.raises(ConfigError, match=r"needs 1 x \(6 CPU\), but Ray has room for 0: 6 CPU on 2 nodes"):
        check_fits("vllm.num_servers", 1, {"CPU": 6.0}, NODES)


def test_what_costs_nothing_always_fits():
    check_fits("reward_workers", 1000, {"CPU": 0.0}, [{"CPU": 1.0}])


def test_what_a_server_reserves():
    config = RayConfig(num_cpus_per_server=2, resources_per_server={"slot": 0.5})
    assert server_resources(config, 4.0) == {"CPU": 2.0, "GPU": 4.0, "slot": 0.5}
    assert server_resources(config, 0.0) == {"CPU": 2.0, "slot": 0.5}
    with pytest.raises(ConfigError, match=r"ray\.num_cpus_per_server=0 leaves servers that reserve nothing"):
        server_resources(RayConfig(num_cpus_per_server=0), 0.0)


def test_cpus_of_servers_and_reward_workers_add_up():
    assert cpus_needed(RayConfig(num_cpus_per_server=2, num_cpus_per_reward_worker=0.25), 3, 5) == 7.25


def test_amounts_in_words():
    assert describe({"GPU": 1.0, "CPU": 0.5}) == "0.5 CPU, 1 GPU"
    assert describe({}) == "nothing"
