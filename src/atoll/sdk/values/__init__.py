"""
What the client returns: a frozen dataclass for each answer of the API.

Times are timezone-aware, sizes are bytes, and durations are seconds unless the name says otherwise.
"""

from __future__ import annotations

from atoll.sdk.values.events import Deliveries, FeedEvent, WebhookInfo, WebhookTest
from atoll.sdk.values.execution_events import ConsoleEvent, ConsoleExit, Event, Retry
from atoll.sdk.values.executions import (
    Answer,
    Approval,
    Artifact,
    Attempt,
    ErrorInfo,
    ExecutionFailed,
    ExecutionInfo,
    InvocationInfo,
    Metrics,
    Result,
    Status,
)
from atoll.sdk.values.files import Entry, FileEvent, Link, Match, Tree
from atoll.sdk.values.nodes import DrainInfo, NodeHealth, NodeInfo, NodeMetrics, PoolInfo
from atoll.sdk.values.session_info import SessionInfo
from atoll.sdk.values.sessions import (
    Checkpoint,
    ContextInfo,
    Limits,
    Mount,
    Notice,
    Packages,
    ProcessInfo,
    VolumeInfo,
)
from atoll.sdk.values.templates import BuildEvent, RegistryInfo, SecurityContext, TemplateInfo

__all__ = [
    "Answer",
    "Approval",
    "Artifact",
    "Attempt",
    "BuildEvent",
    "Checkpoint",
    "ConsoleEvent",
    "ConsoleExit",
    "ContextInfo",
    "Deliveries",
    "DrainInfo",
    "Entry",
    "ErrorInfo",
    "Event",
    "ExecutionFailed",
    "ExecutionInfo",
    "FeedEvent",
    "FileEvent",
    "InvocationInfo",
    "Limits",
    "Link",
    "Match",
    "Metrics",
    "Mount",
    "NodeHealth",
    "NodeInfo",
    "NodeMetrics",
    "Notice",
    "Packages",
    "PoolInfo",
    "ProcessInfo",
    "RegistryInfo",
    "Result",
    "Retry",
    "SecurityContext",
    "SessionInfo",
    "Status",
    "TemplateInfo",
    "Tree",
    "VolumeInfo",
    "WebhookInfo",
    "WebhookTest",
]
