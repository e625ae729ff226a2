import pytest

from serving.client.answers import NotAnswered
from serving.client.client import AsyncClient, Client
from serving.client.fakes import AsyncFakeClient, FakeClient


def test_the_fake_returns_its_items_and_records_the_calls() -> None:
    with FakeClient(["i1", "i2", "i3"]) as fake:
        answer = fake.recommend(["i1"], user_id="u", k=1)
    assert [item.item_id for item in answer.items] == ["i2"]
    assert not answer.degraded
    assert fake.calls == [{"basket": ["i1"], "user_id": "u", "k": 1}]
    assert len(FakeClient(list(map(str, range(150)))).recommend([], k=150).items) == 100
    with pytest.raises(NotAnswered):
        FakeClient(failure="deadline_exceeded", strict=True).recommend([])


async def test_the_asynchronous_fake_does_the_same() -> None:
    async with AsyncFakeClient(["b1", "b2"], failure="overloaded") as fake:
        answer = await fake.recommend(["b2"])
    assert fake.calls == [{"basket": ["b2"]}]
    assert (answer.degraded_reason, [item.item_id for item in answer.items]) == ("overloaded", ["b1"])


def test_all_clients_have_the_same_methods() -> None:
    public = {
        kind: {name for name in vars(kind) if not name.startswith("_")}
        for kind in (Client, AsyncClient, FakeClient, AsyncFakeClient)
    }
    assert set(map(frozenset, public.values())) == {frozenset({"recommend", "close"})}
