//! Idle VMs.

use serde::{Deserialize, Serialize};

/// What happens to a VM that is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdlePolicy {
    /// How long it is idle before that, seconds; 300 unless a request says it.
    #[serde(default = "default_after_s")]
    pub after_s: u32,
    /// What is done then.
    #[serde(default)]
    pub action: IdleAction,
}

fn default_after_s() -> u32 {
    300
}

/// What is done with a VM that is idle.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdleAction {
    /// It is hibernated, and woken by the next use.
    #[default]
    Hibernate,
    /// It is stopped.
    Stop,
}

/// What the node knows of a VM's activity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmIdle {
    /// How long it is idle before something is done, seconds.
    pub after_s: u32,
    /// What is done then.
    pub action: IdleAction,
    /// Seconds since it was last active, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_s: Option<u64>,
    /// What keeps it awake, each in words, such as `1 exec` or `CPU 12.0 %`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub awake: Vec<String>,
    /// Why it could not be hibernated or stopped when it was idle; one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl From<IdlePolicy> for VmIdle {
    fn from(policy: IdlePolicy) -> VmIdle {
        VmIdle {
            after_s: policy.after_s,
            action: policy.action,
            idle_s: None,
            awake: Vec::new(),
            error: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_without_a_time_means_five_minutes() {
        let read = |text: &str| serde_json::from_str::<IdlePolicy>(text).unwrap();
        let hibernate = IdlePolicy {
            after_s: 300,
            action: IdleAction::Hibernate,
        };
        assert_eq!(read("{}"), hibernate);
        let stop = IdlePolicy {
            action: IdleAction::Stop,
            ..hibernate
        };
        assert_eq!(read(r#"{"action": "stop"}"#), stop);
        assert_eq!(read(r#"{"after_s": 60}"#).after_s, 60);
    }
}
