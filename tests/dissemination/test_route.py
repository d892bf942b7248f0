"""Which snapshots are fetched: against every chain there is."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.dissemination.route import Offer, cheapest_route

offers = st.builds(Offer, st.integers(1, 6), st.none() | st.integers(0, 6), st.integers(0, 40))


def test_small_deltas_are_chained_and_large_ones_give_way_to_the_anchor() -> None:
    chain = [Offer(version + 1, version, 30) for version in range(3, 6)]
    assert cheapest_route(3, 6, [*chain, Offer(6, None, 100)]) == tuple(chain)
    assert cheapest_route(3, 6, [*chain, Offer(6, None, 80)]) == (Offer(6, None, 80),)
    assert cheapest_route(None, 6, [*chain, Offer(6, None, 100)]) == (Offer(6, None, 100),)


def test_an_older_anchor_and_the_deltas_after_it_are_a_route() -> None:
    assert cheapest_route(None, 6, [Offer(6, 5, 2), Offer(5, None, 100)]) == (Offer(5, None, 100), Offer(6, 5, 2))


def test_of_equal_bytes_the_fewer_steps_are_taken() -> None:
    assert cheapest_route(1, 3, [Offer(2, 1, 5), Offer(3, 2, 5), Offer(3, 1, 10)]) == (Offer(3, 1, 10),)


def test_what_is_held_needs_nothing_and_what_is_out_of_reach_has_no_route() -> None:
    assert cheapest_route(4, 4, [Offer(4, None, 7)]) == ()
    assert cheapest_route(4, 6, [Offer(6, 5, 7)]) is None
    assert cheapest_route(None, 6, []) is None
    assert cheapest_route(6, 4, [Offer(4, 6, 7)]) is None


@settings(derandomize=True, deadline=None)
@given(held=st.none() | st.integers(0, 5), wanted=st.integers(0, 6), available=st.lists(offers, max_size=6))
def test_no_chain_is_cheaper(held, wanted, available) -> None:
    def leads_there(chain) -> bool:
        version = held
        for offer in chain:
            if offer.base_version is not None and (offer.base_version != version or offer.version <= version):
                return False
            version = offer.version
        return version == wanted

    chains = (chain for length in range(len(available) + 1) for chain in itertools.permutations(available, length))
    costs = [(sum(offer.transfer_bytes for offer in chain), len(chain)) for chain in chains if leads_there(chain)]
    route = cheapest_route(held, wanted, available)
    if route is None:
        assert costs == []
    else:
        assert leads_there(route)
        assert (sum(offer.transfer_bytes for offer in route), len(route)) == min(costs)
