"""What the launcher remembers of the environments and images of one client.

The state moves only through the tables of `legality`. Books are memory and not truth: what exists
is read from the kernel (`kernel.inventory`), and destruction never consults them.
"""

from sbxd.launcher.legality import (
    Illegal,
    ImageState,
    ImageTrigger,
    State,
    Trigger,
    image_transition,
    require_known_leaf,
    require_next_leaf,
    require_volume_within,
    require_within,
    transition,
)
from sbxd.launcher.pool import Job
from sbxd.launcher.requests import (
    Assign,
    Boot,
    DropLeaf,
    Failed,
    ImageDrop,
    Kernel,
    Leaf,
    Prepare,
    Share,
)

ENVIRONMENTS_MAX = 4096
WAITERS_MAX = 1024  # tickets that wait for one end


class Environment:
    """One environment. `waiters` are the tickets of Destroy that wait for its end; `failure` is
    the answer to a Prepare that failed, held back until nothing is left."""

    def __init__(self, request: Prepare | None) -> None:
        self.state = State.ABSENT
        self.request = request
        self.uid_base = 0
        self.boot: Job | None = None
        self.volume_kind = ""
        self.party = 0
        self.last_leaf = 1
        self.waiters: list[int] = []
        self.failure: Failed | None = None

    def move(self, trigger: Trigger) -> State:
        """Take the transition; the state before it is returned. Raises Illegal."""
        before = self.state
        self.state = transition(before, trigger)
        return before


class Image:
    """One image and the tickets that wait for the end of what is under way."""

    def __init__(self) -> None:
        self.state = ImageState.SETTLED
        self.waiters: list[int] = []

    def move(self, trigger: ImageTrigger) -> ImageState:
        """As Environment.move."""
        before = self.state
        self.state = image_transition(before, trigger)
        return before


def wait(waiters: list[int], ticket: int) -> None:
    """Enter a ticket. Raises Illegal when too many wait for the same end."""
    if len(waiters) >= WAITERS_MAX:
        raise Illegal("too many wait for the same end")
    waiters.append(ticket)


class Books:
    """All environments and images. Every method that raises Illegal has changed nothing."""

    def __init__(self) -> None:
        self.environments: dict[str, Environment] = {}
        self.images: dict[str, Image] = {}

    def image(self, image_digest: str) -> Image:
        """The record of an image, for as long as something is under way with it."""
        return self.images.setdefault(image_digest, Image())

    def end_image(self, image_digest: str) -> list[int]:
        """What was under way is over: the image is forgotten. Who waited for that."""
        image = self.images.pop(image_digest)
        image.move(ImageTrigger.ENDED)
        return image.waiters

    def begin_prepare(self, request: Prepare) -> Environment:
        """Enter a new environment. Raises Illegal."""
        if request.environment_id in self.environments:
            state = self.environments[request.environment_id].state
            raise Illegal(f"prepare in state {state}")
        if len(self.environments) >= ENVIRONMENTS_MAX:
            raise Illegal("too many environments")
        self.images.get(request.image_digest, Image()).move(ImageTrigger.USE)
        environment = Environment(request)
        environment.move(Trigger.PREPARE)
        self.environments[request.environment_id] = environment
        return environment

    def begin_destroy(self, environment_id: str) -> tuple[Environment, State]:
        """Move to DESTROYING; the state before is returned. Raises Illegal."""
        environment = self.environments.get(environment_id)
        if environment is None:
            if len(self.environments) >= ENVIRONMENTS_MAX:
                raise Illegal("too many environments")
            environment = Environment(None)
        before = environment.move(Trigger.DESTROY)
        self.environments[environment_id] = environment
        return environment, before

    def forget(self, environment_id: str) -> None:
        """The environment is gone."""
        del self.environments[environment_id]

    def admit_leaf(self, request: Leaf) -> Environment:
        """Whether this leaf may be made now. Raises Illegal."""
        environment, prepared = self._live(request.environment_id, Trigger.LEAF)
        if prepared.kernel is not Kernel.HOST:
            raise Illegal("leaf without a Sentry")
        require_within(prepared.most, request.limits)
        require_next_leaf(environment.last_leaf, request.number)
        return environment

    def admit_boot(self, request: Boot) -> Environment:
        """Whether a Sentry may be booted in this leaf now. Raises Illegal."""
        environment, prepared = self._live(request.environment_id, Trigger.BOOT)
        if prepared.kernel is not Kernel.SENTRY or environment.boot is not None:
            raise Illegal("boot of an environment that has no Sentry, or that boots one")
        require_within(prepared.most, request.limits)
        require_next_leaf(environment.last_leaf, request.number)
        return environment

    def admit_drop_leaf(self, request: DropLeaf) -> Environment:
        """Whether this leaf may be removed now. Raises Illegal."""
        environment, _ = self._live(request.environment_id, Trigger.DROP_LEAF)
        require_known_leaf(environment.last_leaf, request.number)
        return environment

    def admit_assign(self, request: Assign) -> Environment:
        """Whether the slot may be handed out with these limits. Raises Illegal."""
        environment, prepared = self._live(request.environment_id, Trigger.ASSIGN)
        require_within(prepared.most, request.limits)
        require_volume_within(prepared.volume, request.volume)
        return environment

    def only_assigned(self, request: Share) -> Share:
        """What of the request is about environments that are handed out now."""
        kept = []
        for each in request.weights:
            environment = self.environments.get(each.environment_id)
            if environment is not None and environment.state is State.ASSIGNED:
                kept.append(each)
        return Share(ticket=request.ticket, weights=tuple(kept))

    def begin_image_drop(self, request: ImageDrop) -> Image:
        """Move the image to DROPPING. Raises Illegal while an environment uses it."""
        for environment in self.environments.values():
            used = environment.request
            if used is not None and used.image_digest == request.image_digest:
                raise Illegal("the image is in use")
        image = self.image(request.image_digest)
        image.move(ImageTrigger.DROP)
        return image

    def _live(self, environment_id: str, trigger: Trigger) -> tuple[Environment, Prepare]:
        environment = self.environments.get(environment_id)
        if environment is None or environment.request is None:
            raise Illegal(f"{trigger} in state {State.ABSENT}")
        transition(environment.state, trigger)
        return environment, environment.request
