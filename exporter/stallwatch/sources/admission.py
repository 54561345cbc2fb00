"""Who gets room when there are more servers than we follow: nobody takes all of it from others.

Any user may start processes that look like servers, as many as he likes, and so may whoever is in a container.  What
is configured, and what root runs on the machine itself, takes any room; of the rest each container or unit has its
most, each user his, and all users together theirs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .cgroups import cgroups_in, parse_cgroup

FEW = 8
"""So few servers are not shared out."""
_OF_USERS = "/user.slice/"
"""What is below it a user may arrange as he likes: a group with the name of a container is none."""


@dataclass(frozen=True, slots=True)
class Berth:
    """Where a server has its room: in a container or unit (`place`), else as a user's; neither when it is trusted."""

    place: str = ""
    user: int | None = None


TRUSTED = Berth()


def berth_of(cgroup: str, user: int) -> Berth:
    """Of a process, by its cgroup file and the user it runs as."""
    placement = parse_cgroup(cgroup)
    is_users = any(_OF_USERS in f"{group.path}/" for group in cgroups_in(cgroup))
    place = "" if is_users else placement.pod_uid or placement.container or placement.unit
    if place:
        return Berth(place)
    return TRUSTED if user == 0 else Berth(user=user)


def has_room(new: Berth, taken: Collection[Berth], most: int) -> bool:
    """Whether there is room for one more beside those there are; `most` servers in all."""
    if len(taken) >= most:
        return False
    if most < FEW or new == TRUSTED:
        return True
    together = sum(1 for berth in taken if (berth.place or berth.user is not None) and berth.place == new.place)
    own = sum(1 for berth in taken if berth == new)
    return together < most - most // 4 and (bool(new.place) or own < most - most // 2)
