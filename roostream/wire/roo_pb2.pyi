from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CloseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSE_UNKNOWN: _ClassVar[CloseReason]
    CLOSE_WINDOW: _ClassVar[CloseReason]
    CLOSE_ENGAGED: _ClassVar[CloseReason]
    CLOSE_NEXT_REQUEST: _ClassVar[CloseReason]
    CLOSE_LATE: _ClassVar[CloseReason]
    CLOSE_EARLY: _ClassVar[CloseReason]

class Disposition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISPOSITION_TRAINED: _ClassVar[Disposition]
    DISPOSITION_FROZEN: _ClassVar[Disposition]
    DISPOSITION_NEGATIVE: _ClassVar[Disposition]
    DISPOSITION_RANDOM: _ClassVar[Disposition]
    DISPOSITION_STALE: _ClassVar[Disposition]
CLOSE_UNKNOWN: CloseReason
CLOSE_WINDOW: CloseReason
CLOSE_ENGAGED: CloseReason
CLOSE_NEXT_REQUEST: CloseReason
CLOSE_LATE: CloseReason
CLOSE_EARLY: CloseReason
DISPOSITION_TRAINED: Disposition
DISPOSITION_FROZEN: Disposition
DISPOSITION_NEGATIVE: Disposition
DISPOSITION_RANDOM: Disposition
DISPOSITION_STALE: Disposition

class Header(_message.Message):
    __slots__ = ("request_id", "user_id", "session_id", "surface", "time_ms", "schema", "model_version", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    user_id: int
    session_id: int
    surface: str
    time_ms: int
    schema: int
    model_version: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., user_id: _Optional[int] = ..., session_id: _Optional[int] = ..., surface: _Optional[str] = ..., time_ms: _Optional[int] = ..., schema: _Optional[int] = ..., model_version: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("floats", "lengths", "ids", "weights", "times", "missing")
    FLOATS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    floats: _containers.RepeatedScalarFieldContainer[float]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    times: _containers.RepeatedScalarFieldContainer[int]
    missing: bytes
    def __init__(self, floats: _Optional[_Iterable[float]] = ..., lengths: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., times: _Optional[_Iterable[int]] = ..., missing: _Optional[bytes] = ...) -> None: ...

class Impression(_message.Message):
    __slots__ = ("header", "ro", "item_ids", "nro", "scores", "positions", "propensities", "weight")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RO_FIELD_NUMBER: _ClassVar[int]
    ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    NRO_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PROPENSITIES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    header: Header
    ro: bytes
    item_ids: _containers.RepeatedScalarFieldContainer[int]
    nro: bytes
    scores: _containers.RepeatedScalarFieldContainer[float]
    positions: _containers.RepeatedScalarFieldContainer[int]
    propensities: _containers.RepeatedScalarFieldContainer[float]
    weight: float
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., ro: _Optional[bytes] = ..., item_ids: _Optional[_Iterable[int]] = ..., nro: _Optional[bytes] = ..., scores: _Optional[_Iterable[float]] = ..., positions: _Optional[_Iterable[int]] = ..., propensities: _Optional[_Iterable[float]] = ..., weight: _Optional[float] = ...) -> None: ...

class Engagement(_message.Message):
    __slots__ = ("header", "event_id", "item_id", "action", "value", "client_time_ms")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    event_id: int
    item_id: int
    action: str
    value: float
    client_time_ms: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., event_id: _Optional[int] = ..., item_id: _Optional[int] = ..., action: _Optional[str] = ..., value: _Optional[float] = ..., client_time_ms: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("nro", "num_rows", "rows")
    NRO_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    nro: bytes
    num_rows: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, nro: _Optional[bytes] = ..., num_rows: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("header", "sample_id", "close_reason", "close_ms", "ro", "item_ids", "parts", "labels", "scores", "positions", "propensities", "weight", "event_ids", "event_candidates", "event_actions", "event_values", "event_times", "actions", "num_duplicates", "labels_before", "untrainable")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REASON_FIELD_NUMBER: _ClassVar[int]
    CLOSE_MS_FIELD_NUMBER: _ClassVar[int]
    RO_FIELD_NUMBER: _ClassVar[int]
    ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PROPENSITIES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    EVENT_IDS_FIELD_NUMBER: _ClassVar[int]
    EVENT_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    EVENT_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    EVENT_VALUES_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIMES_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    LABELS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    UNTRAINABLE_FIELD_NUMBER: _ClassVar[int]
    header: Header
    sample_id: int
    close_reason: CloseReason
    close_ms: int
    ro: bytes
    item_ids: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    labels: _containers.RepeatedScalarFieldContainer[float]
    scores: _containers.RepeatedScalarFieldContainer[float]
    positions: _containers.RepeatedScalarFieldContainer[int]
    propensities: _containers.RepeatedScalarFieldContainer[float]
    weight: float
    event_ids: _containers.RepeatedScalarFieldContainer[int]
    event_candidates: _containers.RepeatedScalarFieldContainer[int]
    event_actions: _containers.RepeatedScalarFieldContainer[int]
    event_values: _containers.RepeatedScalarFieldContainer[float]
    event_times: _containers.RepeatedScalarFieldContainer[int]
    actions: _containers.RepeatedScalarFieldContainer[str]
    num_duplicates: int
    labels_before: _containers.RepeatedScalarFieldContainer[float]
    untrainable: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., sample_id: _Optional[int] = ..., close_reason: _Optional[_Union[CloseReason, str]] = ..., close_ms: _Optional[int] = ..., ro: _Optional[bytes] = ..., item_ids: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., labels: _Optional[_Iterable[float]] = ..., scores: _Optional[_Iterable[float]] = ..., positions: _Optional[_Iterable[int]] = ..., propensities: _Optional[_Iterable[float]] = ..., weight: _Optional[float] = ..., event_ids: _Optional[_Iterable[int]] = ..., event_candidates: _Optional[_Iterable[int]] = ..., event_actions: _Optional[_Iterable[int]] = ..., event_values: _Optional[_Iterable[float]] = ..., event_times: _Optional[_Iterable[int]] = ..., actions: _Optional[_Iterable[str]] = ..., num_duplicates: _Optional[int] = ..., labels_before: _Optional[_Iterable[float]] = ..., untrainable: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("time_ms", "producer")
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    producer: str
    def __init__(self, time_ms: _Optional[int] = ..., producer: _Optional[str] = ...) -> None: ...

class EndMarker(_message.Message):
    __slots__ = ("time_ms",)
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    def __init__(self, time_ms: _Optional[int] = ...) -> None: ...

class RowDelta(_message.Message):
    __slots__ = ("schema", "bucket", "incarnation", "sequence", "table_id", "dim", "ids", "rows", "num_tombstones", "oldest_engagement_ms", "oldest_close_ms", "oldest_trained_ms", "stack", "more")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_ENGAGEMENT_MS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_CLOSE_MS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_TRAINED_MS_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    schema: int
    bucket: int
    incarnation: int
    sequence: int
    table_id: int
    dim: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[float]
    num_tombstones: int
    oldest_engagement_ms: int
    oldest_close_ms: int
    oldest_trained_ms: int
    stack: str
    more: bool
    def __init__(self, schema: _Optional[int] = ..., bucket: _Optional[int] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., table_id: _Optional[int] = ..., dim: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[float]] = ..., num_tombstones: _Optional[int] = ..., oldest_engagement_ms: _Optional[int] = ..., oldest_close_ms: _Optional[int] = ..., oldest_trained_ms: _Optional[int] = ..., stack: _Optional[str] = ..., more: bool = ...) -> None: ...

class Barrier(_message.Message):
    __slots__ = ("incarnation", "bucket", "rebootstrap", "stack")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    REBOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    bucket: int
    rebootstrap: bool
    stack: str
    def __init__(self, incarnation: _Optional[int] = ..., bucket: _Optional[int] = ..., rebootstrap: bool = ..., stack: _Optional[str] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("sample_id", "time_ms", "item_ids", "scores", "labels", "served_scores", "step", "partition", "offset", "disposition", "train_weight", "metric_weight")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SERVED_SCORES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DISPOSITION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    METRIC_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    sample_id: int
    time_ms: int
    item_ids: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    labels: _containers.RepeatedScalarFieldContainer[float]
    served_scores: _containers.RepeatedScalarFieldContainer[float]
    step: int
    partition: int
    offset: int
    disposition: Disposition
    train_weight: float
    metric_weight: float
    def __init__(self, sample_id: _Optional[int] = ..., time_ms: _Optional[int] = ..., item_ids: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ..., labels: _Optional[_Iterable[float]] = ..., served_scores: _Optional[_Iterable[float]] = ..., step: _Optional[int] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., disposition: _Optional[_Union[Disposition, str]] = ..., train_weight: _Optional[float] = ..., metric_weight: _Optional[float] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("reason", "topic", "partition", "offset", "error", "raw", "raw_bytes", "event_id", "request_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    reason: str
    topic: str
    partition: int
    offset: int
    error: str
    raw: bytes
    raw_bytes: int
    event_id: int
    request_id: str
    def __init__(self, reason: _Optional[str] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., error: _Optional[str] = ..., raw: _Optional[bytes] = ..., raw_bytes: _Optional[int] = ..., event_id: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class RankAnswer(_message.Message):
    __slots__ = ("request_id", "model_version", "tasks", "scores", "order", "degraded")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model_version: str
    tasks: _containers.RepeatedScalarFieldContainer[str]
    scores: _containers.RepeatedScalarFieldContainer[float]
    order: _containers.RepeatedScalarFieldContainer[int]
    degraded: bool
    def __init__(self, request_id: _Optional[str] = ..., model_version: _Optional[str] = ..., tasks: _Optional[_Iterable[str]] = ..., scores: _Optional[_Iterable[float]] = ..., order: _Optional[_Iterable[int]] = ..., degraded: bool = ...) -> None: ...
