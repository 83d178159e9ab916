//! Configuration, commands and events of `jiffy-vmm`.
//!
//! The node writes a [`VmmConfig`] as JSON into the VM's folder and starts `jiffy-vmm run --config
//! FILE [--events-fd N]`. The VMM writes events to the inherited descriptor, one JSON object per
//! line. The node sends commands to the Unix socket `control`, one JSON object per line, and each
//! is answered with one line. At its end the VMM writes an [`ExitRecord`] to `exit.json`.
//!
//! A spare VMM, `jiffy-vmm run --config PLACEHOLDER --spare-fd N`, does everything that needs no
//! configuration and then waits on that socket for a [`TakeSpare`]. With `--fd` [`SPARE_KERNEL`]`=N`
//! it also loads the kernel that most VMs boot.
//!
//! With [`VmmConfig::restore`] the VM is not booted but restored from a captured one
//! ([`ControlRequest::Capture`]).

mod config;
mod control;
mod disk;
mod events;
mod net;
mod probe;
mod restore;

pub use config::{
    Boot, Folder, FwCfgContents, FwCfgFile, Handed, Memory, PageSize, Serial, VmmConfig, Vsock,
};
pub use control::{BalloonStatus, ControlRequest, ControlResponse, MemoryStatus, ReadUnits};
pub use disk::{Disk, DiskLimit, Residency};
pub use events::{Activity, ExitReason, ExitRecord, VmmEvent};
pub use net::{Guard, Net, NetBackend, NetLimit};
pub use probe::{KvmKind, KvmProbe};
pub use restore::{Extent, MemoryLayout, NewGeneration, Restore, SavedMemory, Source};

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Version that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// Name of the inherited descriptor of the kernel that a spare VMM loads ahead.
pub const SPARE_KERNEL: &str = "kernel";

/// Makes a spare VMM this VM. One message of JSON with descriptors: standard output and error,
/// events, then those that [`Source::Fd`] refers to by the numbers that they would have if
/// inherited, from 4 on ([`TakeSpare::FIRST_SOURCE`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeSpare {
    /// Path of the configuration, as long as the placeholder on the command line, which it
    /// replaces. Its folder becomes the working directory.
    pub config: PathBuf,
    /// Number of the open configuration file among the descriptors, for a VMM that can't open
    /// files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_fd: Option<i32>,
}

impl TakeSpare {
    /// Number of the first descriptor after those of output and events.
    pub const FIRST_SOURCE: i32 = 4;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU64;

    #[test]
    fn an_extent_is_read_in_its_current_and_old_form() {
        let range = Extent {
            offset: 8192,
            length: 4096,
        };
        let text = serde_json::to_string(&range).unwrap();
        assert_eq!(text, "[8192,4096]");
        for text in [&*text, r#"{"offset":8192,"length":4096}"#] {
            assert_eq!(serde_json::from_str::<Extent>(text).unwrap(), range);
        }
        assert!(serde_json::from_str::<Extent>("[8192]").is_err());
    }

    fn folder(server: Option<i32>) -> Folder {
        let tag = "src".into();
        Folder { tag, server }
    }

    #[test]
    fn a_network_interface_has_defaults_and_refers_to_descriptors() {
        let text = r#"{"version":1,"id":"a","vcpus":1,"memory":{"size_mib":64},
            "boot":{"kernel":"/k"},"nets":[
            {"mac":"02:4a:46:00:00:01","mtu":1400,"backend":{"tap":[5,6]},
             "send_limit":{"bytes_per_second":1000000,"packets_burst":10}},
            {"mac":"02:4a:46:00:00:02","backend":{"passt":{"fd":7}},
             "guard":{"closed":[["10.0.0.0",8]],"tcp":[[80,80]]}},
            {"mac":"02:4a:46:00:00:03","backend":{"passt":{"path":"/s"}}},
            {"mac":"02:4a:46:00:00:04"}]}"#;
        let mut config: VmmConfig = serde_json::from_str(text).unwrap();
        assert_eq!(config.nets[3].backend, NetBackend::None);
        assert_eq!((config.nets[0].mtu, config.nets[1].mtu), (Some(1400), None));
        assert!(config.nets[0].receive_limit.is_none() && config.nets[1].send_limit.is_none());
        assert_eq!(config.nets[0].send_limit.packets_burst, NonZeroU64::new(10));
        config.restore = Restore::of_captured(&[8, 9, 4]);
        config.folders = [Some(10), None].map(folder).to_vec();
        let numbers: Vec<i32> = config.descriptors().map(|number| *number).collect();
        assert_eq!(numbers, [4, 9, 8, 5, 6, 7, 10]);
        let written = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<VmmConfig>(&written).unwrap(), config);
        for bad in [
            r#"{"mac":"02:4a:46:00:00"}"#,
            r#"{"mac":"02:4a:46:00:00:01","mtu":65536}"#,
            r#"{"mac":"02:4a:46:00:00:01","queues":2}"#,
            r#"{"mac":"02:4a:46:00:00:01","backend":"tap"}"#,
            r#"{"backend":"none"}"#,
        ] {
            assert!(serde_json::from_str::<Net>(bad).is_err(), "{bad}");
        }
    }
}
