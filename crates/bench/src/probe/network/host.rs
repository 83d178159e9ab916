//! The host's side of a VM's network: made as the node does, and by commands.

use super::run_all;
use crate::plan::{HostCommands, Sample};
use crate::probe::now_ns;
use anyhow::Result;
use jiffy_net::VmId;
use jiffy_net::host::{GuestSpec, Host, HostOptions};
use jiffy_net::names::{Asker, Directory};
use jiffy_net::policy::Policy;
use jiffy_wire::timeline::names;
use std::collections::{BTreeMap, BTreeSet};

/// The network of a host and the names of its VMs.
pub struct HostSide {
    host: Host,
    directory: Directory,
}

impl HostSide {
    /// The network of a case, opened by its first run.
    ///
    /// # Errors
    ///
    /// If the host's network can't be opened.
    pub fn of(side: &mut Option<HostSide>) -> Result<&mut HostSide> {
        if side.is_none() {
            let (host, _) = Host::open(HostOptions::default(), &[], &BTreeSet::new())?;
            let directory = Directory::new(host.ranges().gateway(), None);
            *side = Some(HostSide { host, directory });
        }
        Ok(side.as_mut().expect("just made"))
    }

    /// Makes a VM's address, link, route, rules and name; then removes them.
    ///
    /// # Errors
    ///
    /// If the address, the link or the rules can't be made or removed.
    pub fn set_up(&mut self, run: u32) -> Result<Sample> {
        let vm = VmId::parse(&format!("{run:012x}"))?;
        let start = now_ns();
        let v4 = self.host.take_address()?;
        let spec = GuestSpec {
            vm,
            v4,
            network: None,
            policy: Policy::default(),
            ports: Vec::new(),
            mtu: 1500,
            queues: 1,
            owner: None,
            asleep: false,
        };
        let attached = self.host.attach(&spec)?;
        self.directory.set(Asker {
            vm,
            name: format!("vm-{run}"),
            network: None,
            policy: Policy::default(),
            v4,
            v6: attached.addresses.v6,
        });
        let end = now_ns();
        let [begun, linked, ruled] = attached.times_ns;
        self.directory.remove(vm);
        self.host.detach(vm)?;
        self.host.free_address(v4);
        Ok(Sample {
            nanoseconds: end - start,
            spans: BTreeMap::from([
                (names::ADDRESS_TAKEN.into(), begun - start),
                (names::LINK_MADE.into(), linked - begun),
                (names::RULES_MADE.into(), ruled - linked),
                (names::NAME_KNOWN.into(), end - ruled),
            ]),
            ..Sample::default()
        })
    }
}

/// Makes the host's side of a VM's network by commands; then removes it.
///
/// # Errors
///
/// If a command fails.
pub fn by_commands(commands: &HostCommands) -> Result<Sample> {
    let start = now_ns();
    run_all(&commands.make)?;
    let end = now_ns();
    run_all(&commands.remove)?;
    Ok(Sample {
        nanoseconds: end - start,
        ..Sample::default()
    })
}
