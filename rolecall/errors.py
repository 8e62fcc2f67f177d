"""Every error of RoleCall, as one tree. Code raises these; one interceptor maps them to gRPC and the client side maps
them back.

Each leaf has a canonical status, a stable `reason` (google.rpc.ErrorInfo, AIP-193) and says whether asking again can
help.

    RoleCallError
    ├── ConfigError               bad configuration or command line        INVALID_ARGUMENT     never retry
    ├── InvalidInputError         a bad request field, prompt or dataset   INVALID_ARGUMENT     never retry
    │   ├── PromptTooLongError    prompt + response exceed the model       INVALID_ARGUMENT     never retry
    │   ├── BadGroundTruthError   nothing a scorer could compare with      INVALID_ARGUMENT     never retry
    │   └── OwnFunctionError      the user's function fails: the role, too INVALID_ARGUMENT     never retry
    ├── UnauthenticatedError      who calls is not known                   UNAUTHENTICATED      never retry
    │   └── PermissionDeniedError a known caller may not                   PERMISSION_DENIED    never retry
    ├── NotFoundError             a named thing does not exist             NOT_FOUND            never retry
    │   ├── RowMissingError       a committed row is gone                  NOT_FOUND            never retry
    │   ├── UnknownWorkerError    a worker must Join again                 NOT_FOUND            never retry
    │   ├── SessionLostError      an environment does not hold the session NOT_FOUND            never retry
    │   └── CheckpointMissingError                                         NOT_FOUND            never retry
    ├── ConflictError             the caller's view of the state is old    FAILED_PRECONDITION  never retry
    │   ├── FencedError           a newer controller is in charge
    │   ├── RunLockedError        another controller holds the run
    │   ├── LeaseLostError        the entry belongs to someone else now
    │   ├── OutOfOrderError       Train or publish for another step
    │   ├── TurnConflictError     a session of an environment stands at another turn
    │   ├── BatchMismatchError    the sealed batch has another digest
    │   ├── StaleEpochError       a weight-channel epoch was seen before
    │   ├── StaleVersionError     a policy version would go back
    │   ├── WrongVersionError     another policy version is held
    │   ├── AsleepError           the rollout's engine sleeps
    │   ├── VersionMismatchError  contracts of another release
    │   ├── RunExistsError        run directory exists, no --resume
    │   ├── CheckpointMismatchError  checkpoint of another model  INVALID_ARGUMENT    never retry
    │   └── StoreRolledBackError  the store is older than the trainers
    ├── UnavailableError          a peer or its state is not ready         UNAVAILABLE          retry
    │   ├── NotAttestedError      the rollout holds no attested weights
    │   ├── ChannelBrokenError    the weight channel failed; open a new epoch
    │   │   └── ChannelUnreachableError this rank cannot take part in it
    │   ├── StoreUnavailableError the store does not answer
    │   ├── StorageUnavailableError the place of checkpoints or of the run's files does not answer
    │   │   └── SaveHangsError    a checkpoint is still being written, past its deadline
    │   ├── ScorerUnavailableError a scorer does not answer
    │   │   └── ScorerLoadingError a server of the run's has not answered yet
    │   ├── EnvironmentAwayError  an environment does not answer, or has no room
    │   └── WorkerLostError       a process or rank died
    ├── DeadlineError             a wait ended without its event           DEADLINE_EXCEEDED    retry
    ├── ExhaustedError            a bound or budget is spent               RESOURCE_EXHAUSTED   never retry
    │   ├── StoreFullError        back-pressure of the store               (retry)
    │   ├── RateLimitedError      a peer takes no more calls for now: pause (retry)
    │   ├── DiskFullError
    │   ├── OutOfMemoryError      device or host lack memory: the role ends too
    │   ├── DeviceFullError       others hold memory of a device that is shared (retry)
    │   └── BudgetSpentError      a failure budget is spent: the run stops
    ├── TornWeightsError          a load did not finish                    DATA_LOSS            never retry
    ├── WeightsMismatchError      fingerprints, coverage or probe differ   DATA_LOSS            never retry
    ├── GenerationError           the engine failed on a request           INTERNAL             never retry
    ├── EpisodeLostError          an environment failed on an episode      INTERNAL             never retry
    ├── ScorerError               a scorer's answer cannot be believed     INTERNAL             never retry
    │   └── AbstainedError        a judge gave no verdict
    └── NotOnThisDeviceError      the device cannot do it                  UNIMPLEMENTED        never retry

`retryable` says that the same call may succeed later, not that it is safe to repeat: each method says whether
it is idempotent.
"""

from typing import ClassVar


class RoleCallError(Exception):
    """Root. `message` is one sentence that names the field, role or worker and the remedy; `details` are string pairs
    for machines.
    """

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "ROLECALL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: str) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class ConfigError(RoleCallError):
    status, reason = "INVALID_ARGUMENT", "BAD_CONFIG"


class InvalidInputError(RoleCallError):
    status, reason = "INVALID_ARGUMENT", "INVALID_INPUT"


class PromptTooLongError(InvalidInputError):
    reason = "PROMPT_TOO_LONG"


class BadGroundTruthError(InvalidInputError):
    reason = "BAD_GROUND_TRUTH"


class OwnFunctionError(InvalidInputError):
    reason = "OWN_FUNCTION"


class UnauthenticatedError(RoleCallError):
    status, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionDeniedError(UnauthenticatedError):
    status, reason = "PERMISSION_DENIED", "PERMISSION_DENIED"


class NotFoundError(RoleCallError):
    status, reason = "NOT_FOUND", "NOT_FOUND"


class RowMissingError(NotFoundError):
    reason = "ROW_MISSING"


class UnknownWorkerError(NotFoundError):
    reason = "UNKNOWN_WORKER"


class SessionLostError(NotFoundError):
    reason = "SESSION_LOST"


class CheckpointMissingError(NotFoundError):
    reason = "CHECKPOINT_MISSING"


class ConflictError(RoleCallError):
    status, reason = "FAILED_PRECONDITION", "CONFLICT"


class FencedError(ConflictError):
    reason = "FENCED"


class RunLockedError(ConflictError):
    reason = "RUN_LOCKED"


class LeaseLostError(ConflictError):
    reason = "LEASE_LOST"


class OutOfOrderError(ConflictError):
    reason = "OUT_OF_ORDER"


class TurnConflictError(ConflictError):
    reason = "TURN_CONFLICT"


class BatchMismatchError(ConflictError):
    reason = "BATCH_MISMATCH"


class StaleEpochError(ConflictError):
    reason = "STALE_EPOCH"


class StaleVersionError(ConflictError):
    reason = "STALE_VERSION"


class WrongVersionError(ConflictError):
    reason = "WRONG_VERSION"


class AsleepError(ConflictError):
    reason = "ASLEEP"


class VersionMismatchError(ConflictError):
    reason = "VERSION_MISMATCH"


class RunExistsError(ConflictError):
    reason = "RUN_EXISTS"


class CheckpointMismatchError(ConflictError):
    status, reason = "INVALID_ARGUMENT", "CHECKPOINT_MISMATCH"


class StoreRolledBackError(ConflictError):
    reason = "STORE_ROLLED_BACK"


class UnavailableError(RoleCallError):
    status, reason, retryable = "UNAVAILABLE", "UNAVAILABLE", True


class NotAttestedError(UnavailableError):
    reason = "NOT_ATTESTED"


class ChannelBrokenError(UnavailableError):
    reason = "CHANNEL_BROKEN"


class ChannelUnreachableError(ChannelBrokenError):
    reason = "CHANNEL_UNREACHABLE"


class StoreUnavailableError(UnavailableError):
    reason = "STORE_UNAVAILABLE"


class StorageUnavailableError(UnavailableError):
    reason = "STORAGE_UNAVAILABLE"


class SaveHangsError(StorageUnavailableError):
    reason = "SAVE_HANGS"


class ScorerUnavailableError(UnavailableError):
    reason = "SCORER_UNAVAILABLE"


class ScorerLoadingError(ScorerUnavailableError):
    reason = "SCORER_LOADING"


class EnvironmentAwayError(UnavailableError):
    reason = "ENVIRONMENT_AWAY"


class WorkerLostError(UnavailableError):
    reason = "WORKER_LOST"


class DeadlineError(RoleCallError):
    status, reason, retryable = "DEADLINE_EXCEEDED", "DEADLINE", True


class ExhaustedError(RoleCallError):
    status, reason = "RESOURCE_EXHAUSTED", "EXHAUSTED"


class StoreFullError(ExhaustedError):
    reason, retryable = "STORE_FULL", True


class RateLimitedError(ExhaustedError):
    """`details` may have `retry_after_s`: how long the peer wants to be left alone."""

    reason, retryable = "RATE_LIMITED", True


class DiskFullError(ExhaustedError):
    reason = "DISK_FULL"


class OutOfMemoryError(ExhaustedError):
    reason = "OUT_OF_MEMORY"


class DeviceFullError(ExhaustedError):
    reason, retryable = "DEVICE_FULL", True


class BudgetSpentError(ExhaustedError):
    reason = "BUDGET_SPENT"


class TornWeightsError(RoleCallError):
    status, reason = "DATA_LOSS", "TORN_WEIGHTS"


class WeightsMismatchError(RoleCallError):
    status, reason = "DATA_LOSS", "WEIGHTS_MISMATCH"


class GenerationError(RoleCallError):
    status, reason = "INTERNAL", "GENERATION_FAILED"


class EpisodeLostError(RoleCallError):
    status, reason = "INTERNAL", "EPISODE_LOST"


class ScorerError(RoleCallError):
    status, reason = "INTERNAL", "SCORER_FAILED"


class AbstainedError(ScorerError):
    reason = "ABSTAINED"


class NotOnThisDeviceError(RoleCallError):
    status, reason = "UNIMPLEMENTED", "NOT_ON_THIS_DEVICE"


ENDS_ROLE = (OutOfMemoryError, OwnFunctionError)
"""Errors that answer a call of a trainer and end its process, too: the step may be partly applied, and another start
cannot help.
"""
