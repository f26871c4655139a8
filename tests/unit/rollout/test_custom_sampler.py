from pathlib import Path

import pytest

from lightning_ppo.errors import ConfigError
from lightning_ppo.rollout.config import RolloutConfig
from lightning_ppo.rollout.custom_sampler import MEMBERS, METHODS
from lightning_ppo.rollout.replay import ReplayBuffer
from lightning_ppo.rollout.samplers import Sampler, make_sampler
from lightning_ppo.testing import make_group

SOURCE = '''
from lightning_ppo.rollout.samplers import InOrderSampler, Sampler, SamplerCapabilities

YES = SamplerCapabilities(True, True, True)


class Newest(InOrderSampler):
    """Trains the last draw first."""

    capabilities = SamplerCapabilities(
        stamps_targets=True, supports_streaming=False, supports_restore=False
    )

    def __init__(self, groups_per_step, window, bonus=0):
        super().__init__(groups_per_step, window)
        self.bonus = bonus

    def select(self, buffer, version, ppo_step, limit):
        return buffer.index.ready()[::-1][:limit]


class Inherits(InOrderSampler):
    pass


class Silent:
    def admit(self, version): ...


class Strange:
    capabilities = "all"


class Bare:
    capabilities = YES
    def __init__(self, groups_per_step, window): ...
    def admit(self, version): ...


class Derived(Sampler):
    capabilities = YES
    is_on_policy = True
    def __init__(self, groups_per_step, window): ...
    def required_capacity(self, groups_per_step): ...
    def seed_dispatch(self, resume_step, version, restored=()): ...
    def admit(self, version): ...
    def select(self, buffer, version, ppo_step, limit): ...
    def aborts_inflight(self, start_version, version): ...


class Short(InOrderSampler):
    capabilities = YES
    def select(self, buffer, version): ...


class Later(InOrderSampler):
    capabilities = YES
    async def admit(self, version): ...


class NoMethod(InOrderSampler):
    capabilities = YES
    evict = 3


class Fails(InOrderSampler):
    capabilities = YES
    def __init__(self, groups_per_step, window):
        raise RuntimeError("no\\nluck")


class Flexible:
    """Everything by instance, by position or by keyword."""
    capabilities = YES
    def __init__(self, *args): self.is_on_policy = True; self.seen = args
    def required_capacity(self, *args): return 0
    seed_dispatch = staticmethod(lambda *args: None)
    admit = select = evict = aborts_inflight = required_capacity


def function(groups_per_step, window): ...
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return str(file)


def config(sampler: str, **settings) -> RolloutConfig:
    return RolloutConfig(num_prompts_per_step=2, min_groups_for_streaming_train=2, sampler=sampler, **settings)


def test_own_sampler_is_built_with_its_options_and_can_be_seeded(path: str) -> None:
    sampler = make_sampler(config(f"{path}:Newest", sampler_options={"bonus": 3}, max_lookahead_versions=1))
    assert isinstance(sampler, Sampler)
    assert (type(sampler).__name__, sampler.bonus) == ("Newest", 3)
    assert sampler.required_capacity(2) == 4
    sampler.seed_dispatch(5, 5, (5,))
    assert [sampler.admit(5).target_step for _ in range(3)] == [5, 6, 6]
    assert sampler.admit(5) is None
    buffer = ReplayBuffer(9, 1)
    for draw in range(3):
        buffer.restore(make_group(draw))
    assert [group.draw for group in sampler.select(buffer, 5, 5, 2)] == [2, 1]


def test_own_sampler_gets_size_and_window(path: str) -> None:
    sampler = make_sampler(config(f"{path}:Flexible", max_trajectory_age_steps=3), warmup_steps=4)
    size, window = sampler.seen
    assert (size, window.max_age, window.warmup_steps) == (2, 3, 4)


def test_own_sampler_of_a_module() -> None:
    sampler = make_sampler(config("lightning_ppo.rollout.gated_samplers:ReadyFirstSampler"))
    assert type(sampler).__name__ == "ReadyFirstSampler"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "mine.py has no Nothing"),
        ("function", "is no class but function; name a class"),
        ("Inherits", "does not declare what it is capable of (inheriting it does not count); set capabilities = "),
        ("Silent", "does not declare"),
        ("Strange", "does not declare"),
        ("Bare", "has no is_on_policy"),
        ("Derived", "has no evict"),
        ("Short", "has select, but not as select(buffer, version, ppo_step, limit)"),
        ("Later", "has an asynchronous admit"),
        ("NoMethod", "has evict, but not as evict(buffer, version, ppo_step)"),
        ("Fails", "cannot be built (RuntimeError: no luck)"),
    ],
)
def test_own_sampler_that_does_not_fit(path: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_sampler(config(f"{path}:{name}"))
    assert message in str(error.value)
    assert str(error.value).startswith(f"sampler={path}:{name} ")
    assert "\n" not in str(error.value)


def test_options_that_the_class_does_not_take(path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be built \(TypeError.*sampler_options=\{'colour': 1\}"):
        make_sampler(config(f"{path}:Newest", sampler_options={"colour": 1}))


def test_path_without_a_file_or_module() -> None:
    with pytest.raises(ConfigError, match=r"sampler=nowhere\.py:Mine does not exist: no file nowhere\.py"):
        make_sampler(config("nowhere.py:Mine"))
    with pytest.raises(ConfigError, match="sampler=:Mine is no import path"):
        make_sampler(config(":Mine"))


def test_every_member_of_the_protocol_is_checked() -> None:
    members = {name for name in vars(Sampler) if not name.startswith("_")} | set(Sampler.__annotations__)
    assert members == set(MEMBERS)
    assert {name for name in members if callable(getattr(Sampler, name, None))} == set(METHODS)
