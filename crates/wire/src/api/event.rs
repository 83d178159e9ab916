//! Events: what happens on a node.

use crate::agent::ExitStatus;
use alloc::string::String;
use serde::{Deserialize, Serialize};

/// Something that happened on the node: a line of `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Unix time, milliseconds.
    pub time_ms: u64,
    /// What kind of thing it happened to.
    pub subject: Subject,
    /// What happened.
    pub action: Action,
    /// Id of the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Name of the VM, image, snapshot, volume or network; empty for [`Subject::Events`].
    pub name: String,
    /// Exit status of the VM's first command, with [`Action::Exited`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitStatus>,
    /// Why a VM exited, unless it ended normally; or how many events are missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// What an event happened to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// A VM.
    Vm,
    /// An image.
    Image,
    /// A snapshot.
    Snapshot,
    /// A volume.
    Volume,
    /// A network.
    Network,
    /// The stream of events itself.
    Events,
    /// A kind that this release does not know.
    #[serde(other)]
    Unknown,
}

/// What happened. For a VM: the state that it has now, or that it was made, changed or removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// It was created, pulled or imported.
    Created,
    /// The VM's VMM runs; the agent is not ready. Also the begin of a wake.
    Starting,
    /// The VM's agent is ready, or its vCPUs were resumed.
    Running,
    /// The VM's vCPUs were stopped by request.
    Paused,
    /// The VM is being stopped.
    Stopping,
    /// The VM's memory is on disk.
    Hibernated,
    /// The VM has ended.
    Exited,
    /// Its limits, network policy or size were changed.
    Updated,
    /// It was removed.
    Removed,
    /// This client was too slow: events are missing here, and it should look at the state again.
    Missed,
    /// An action that this release does not know.
    #[serde(other)]
    Unknown,
}

impl Subject {
    /// As in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Vm => "vm",
            Subject::Image => "image",
            Subject::Snapshot => "snapshot",
            Subject::Volume => "volume",
            Subject::Network => "network",
            Subject::Events => "events",
            Subject::Unknown => "unknown",
        }
    }
}

impl Action {
    /// As in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Action::Created => "created",
            Action::Starting => "starting",
            Action::Running => "running",
            Action::Paused => "paused",
            Action::Stopping => "stopping",
            Action::Hibernated => "hibernated",
            Action::Exited => "exited",
            Action::Updated => "updated",
            Action::Removed => "removed",
            Action::Missed => "missed",
            Action::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_of_a_later_release_is_read() {
        let line = r#"{"time_ms":1,"subject":"gpu","action":"moved","name":"a","new":true}"#;
        let event: Event = serde_json::from_str(line).unwrap();
        assert_eq!(
            (event.subject, event.action),
            (Subject::Unknown, Action::Unknown)
        );
    }

    #[test]
    fn names_are_those_of_the_json_form() {
        for action in [
            Action::Created,
            Action::Starting,
            Action::Running,
            Action::Paused,
            Action::Stopping,
            Action::Hibernated,
            Action::Exited,
            Action::Updated,
            Action::Removed,
            Action::Missed,
        ] {
            let json = serde_json::to_value(action).unwrap();
            assert_eq!(json, action.name());
        }
        for subject in [
            Subject::Vm,
            Subject::Image,
            Subject::Snapshot,
            Subject::Volume,
            Subject::Network,
            Subject::Events,
        ] {
            let json = serde_json::to_value(subject).unwrap();
            assert_eq!(json, subject.name());
        }
    }
}
