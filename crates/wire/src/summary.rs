//! A VM in one line: what a list of many shows of each.
//!
//! A node may have thousands. A summary holds what a line needs and no more, and is
//! written and read without copies of its text. Its fields are some of [`Vm`]'s, so
//! that a list of whole VMs reads as one of summaries.

use crate::agent::ExitStatus;
use crate::api::{Origin, Vm, VmState};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// What a client says in a `Prefer` header (RFC 7240 §4.2) to get summaries. A node
/// that has none answers with whole VMs.
pub const PREFER: &str = "return=minimal";

/// A [`Vm`] in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSummary<'a> {
    /// 12 hexadecimal digits.
    #[serde(borrow)]
    pub id: Cow<'a, str>,
    /// Its name.
    #[serde(borrow)]
    pub name: Cow<'a, str>,
    /// Where it is in its life.
    pub state: VmState,
    /// Image name.
    #[serde(borrow)]
    pub image: Cow<'a, str>,
    /// Kernel name.
    #[serde(borrow)]
    pub kernel: Cow<'a, str>,
    /// vCPUs.
    pub cpus: u8,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// The first command's argv, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<Cow<'a, [String]>>,
    /// Unix time of creation, seconds.
    pub created: u64,
    /// Unix time of the last start, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<u64>,
    /// Unix time of the last end, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
    /// How the first command ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitStatus>,
    /// What is wrong with it, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Cow<'a, str>>,
    /// Where its memory came from, if it did not boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Cow<'a, Origin>>,
}

impl<'a> VmSummary<'a> {
    /// Of this VM.
    pub fn of(vm: &'a Vm) -> VmSummary<'a> {
        VmSummary {
            id: Cow::Borrowed(&vm.id),
            name: Cow::Borrowed(&vm.name),
            state: vm.state,
            image: Cow::Borrowed(&vm.image),
            kernel: Cow::Borrowed(&vm.kernel),
            cpus: vm.cpus,
            memory_mib: vm.memory_mib,
            command: vm.command.as_deref().map(Cow::Borrowed),
            created: vm.created,
            started: vm.started,
            ended: vm.ended,
            exit: vm.exit,
            error: vm.error.as_deref().map(Cow::Borrowed),
            origin: vm.origin.as_ref().map(Cow::Borrowed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm() -> Vm {
        let json = r#"{"id":"0123456789ab","name":"web","state":"exited","image":"base",
            "kernel":"base","cpus":1,"memory_mib":128,"command":["sh","-c","a \"b\""],
            "disks":[],"created":5,"started":6,"ended":7,"pid":null,"cid":3,
            "exit":{"signal":9},"error":"it was killed","remove":false,
            "origin":{"forked_from":"other"}}"#;
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_summary_survives_its_way_and_is_read_out_of_a_whole_vm() {
        let vm = vm();
        for text in [
            serde_json::to_string(&VmSummary::of(&vm)).unwrap(),
            serde_json::to_string(&vm).unwrap(),
        ] {
            let summary: VmSummary<'_> = serde_json::from_str(&text).unwrap();
            assert_eq!(summary, VmSummary::of(&vm));
            assert!(matches!(summary.id, Cow::Borrowed(_)), "it is not copied");
        }
    }
}
