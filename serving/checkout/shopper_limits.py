"""A shopper and a moment -> whether more is computed for them: who asks without end slows nobody else down.

The generic cell rate algorithm (ITU-T I.371): of each shopper one number is kept, the moment at which what
was computed is paid for at the limit's rate.
"""

from __future__ import annotations

BURST_S = 5.0  # what the limit gives in so many seconds may be had at once
MOST = 10_000  # shoppers that are remembered at least, before those within their limit are forgotten


class UserLimits:
    """Belongs to one event loop; who is not known by an id has no limit."""

    def __init__(self, per_s: float) -> None:
        """Take how many answers a second are computed for one shopper; 0: as many as are asked for."""
        self._per_s = per_s
        self._paid_at: dict[str, float] = {}
        self._most = MOST

    def allows(self, user_id: str | None, now: float) -> bool:
        """Say whether another answer may be computed for a shopper at a moment of perf_counter."""
        return user_id is None or self._paid_at.get(user_id, now) <= now + BURST_S

    def spend(self, user_id: str | None, now: float) -> None:
        """Take note that an answer is computed for a shopper."""
        if user_id is None or not self._per_s:
            return
        self._paid_at[user_id] = max(self._paid_at.get(user_id, now), now) + 1 / self._per_s
        if len(self._paid_at) > self._most:
            self._paid_at = {user: at for user, at in self._paid_at.items() if at > now}
            # Where most are not within it, none of them would go the next time either.
            self._most = max(MOST, 2 * len(self._paid_at))
