//! Network interfaces.

use super::Devices;
use super::error::DeviceError;
use super::virtio::{Virtio, VirtioKind};
use super::wiring::Wiring;
use crate::sections::{Count, Section};
use jiffy_devices::virtio::device::WorkerRole;
use jiffy_devices::virtio::net::guard::{Guard, Range};
use jiffy_devices::virtio::net::{Backend, Mac, Net, NetArgs, NetState};
use jiffy_devices::virtio::queue::RateLimit;
use jiffy_sys::fds;
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::{
    Guard as GuardConfig, Net as NetConfig, NetBackend, NetLimit, Source, VmmConfig,
};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Network interfaces, in the order of the configuration.
#[derive(Debug)]
pub struct NetKind;

impl VirtioKind for NetKind {
    type Device = Net;
    type State = NetState;
    const SECTION: Section = Section::new("net", 1);
    const NAME: &'static str = "network interfaces";
    const COUNT: Count = Count::Any;

    fn count(config: &VmmConfig) -> usize {
        config.nets.len()
    }

    fn workers(config: &VmmConfig) -> Vec<WorkerRole> {
        config.nets.iter().map(|_| WorkerRole::Net).collect()
    }

    fn create(
        wiring: &Wiring<'_>,
        number: usize,
        state: Option<&NetState>,
    ) -> Result<Net, DeviceError> {
        let config = &wiring.args.config.nets[number];
        let args = NetArgs {
            mac: Mac(config.mac.0),
            mtu: config.mtu,
            guard: config.guard.as_ref().map(guard),
            receive_limit: rate(&config.receive_limit),
            send_limit: rate(&config.send_limit),
            backend: backend(config)?,
        };
        Ok(match state {
            None => Net::new(args)?,
            Some(state) => Net::restore(args, state)?,
        })
    }

    fn save(device: &mut Net) -> Result<NetState, DeviceError> {
        Ok(device.save())
    }
}

impl Devices {
    /// Adds each interface's counters, with names such as `net0_sent_bytes`.
    pub fn add_net_totals(&self, sums: &mut BTreeMap<String, u64>) {
        for (number, device) in self.all::<Virtio<NetKind>>().enumerate() {
            let totals = lock(device).device().totals();
            let mut add = |name, value| sums.insert(format!("net{number}_{name}"), value);
            add("received_frames", totals.received_frames);
            add("received_bytes", totals.received_bytes);
            add("received_dropped", totals.received_dropped);
            add("sent_frames", totals.sent_frames);
            add("sent_bytes", totals.sent_bytes);
            add("sent_dropped", totals.sent_dropped);
            add("sent_spoofed", totals.sent_spoofed);
            add("sent_refused", totals.sent_refused);
        }
    }
}

pub(super) fn rate(limit: &NetLimit) -> RateLimit {
    RateLimit {
        bytes_per_second: limit.bytes_per_second,
        operations_per_second: limit.packets_per_second,
        bytes_burst: limit.bytes_burst,
        operations_burst: limit.packets_burst,
    }
}

fn guard(config: &GuardConfig) -> Guard {
    let range = |&(address, prefix): &(_, u8)| Range::new(address, prefix);
    Guard {
        closed: config.closed.iter().map(range).collect(),
        name_servers: config.name_servers.clone(),
        tcp: config.tcp.clone(),
    }
}

fn backend(config: &NetConfig) -> Result<Backend, DeviceError> {
    let inherited = |number: i32| -> Result<OwnedFd, DeviceError> {
        let mac = config.mac;
        fds::inherited(number).map_err(|_| DeviceError::NetDescriptor { mac, number })
    };
    Ok(match &config.backend {
        NetBackend::None => Backend::None,
        NetBackend::Tap(numbers) => {
            let queues = numbers.iter().map(|number| inherited(*number));
            Backend::Tap(queues.collect::<Result<_, _>>()?)
        }
        NetBackend::Passt(Source::Fd(number)) => Backend::Passt(inherited(*number)?.into()),
        NetBackend::Passt(Source::Path(path)) => {
            let socket = UnixStream::connect(path).map_err(|source| DeviceError::Passt {
                path: path.clone(),
                source,
            })?;
            Backend::Passt(socket)
        }
    })
}
