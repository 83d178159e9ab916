//! The network where there is one: the host's side, and what VMs hold of it.

use super::failures::{failed, port_error};
use super::ids::{id_of, v4_of};
use super::names::plain;
use super::specs::spec_of;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::network::Networks;
use jiffy_content::model::vm::{Spec, VmRecord};
use jiffy_content::names as rules;
use jiffy_content::records::networks;
use jiffy_net::VmId;
use jiffy_net::host::{Addresses, GuestSpec, Host};
use jiffy_net::inbound::{Acceptor, InboundConnection, Reached, SleepingVm};
use jiffy_net::names::{Asker, Directory};
use jiffy_net::policy::hold::Held;
use jiffy_sys::causes;
use jiffy_sys::mutex::lock;
use jiffy_wire::api::NetworkUse;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::warn;

/// The network.
#[derive(Debug)]
pub(super) struct On {
    pub(super) inner: Mutex<Inner>,
    pub(super) directory: Arc<Directory>,
    /// Ports for loopback are published on all addresses: in the machine, loopback is not the
    /// user's.
    pub(super) everywhere: bool,
    /// Notifies that VMs have ended and must be detached.
    pub(super) left: Notify,
    /// Notifies that tracked connections of removed VMs must be deleted.
    pub(super) released: Notify,
    /// Notifies that a link must be prepared.
    pub(super) wanted: Notify,
    /// Accepts connections to ports of hibernated VMs.
    pub(super) inbound: Acceptor,
    /// The accepted connections, until `Network::inbound` takes them.
    pub(super) waiting: Mutex<Option<UnboundedReceiver<InboundConnection>>>,
    pub(super) file: PathBuf,
    /// Keeps other daemons from using the network of this network namespace.
    pub(super) _lock: UnixListener,
}

/// What is changed together.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) host: Host,
    pub(super) networks: Networks,
    /// Published ports.
    pub(super) held: HashMap<VmId, Held>,
    /// Descriptors of VMs' TAPs, besides those of their monitors. They keep a link after its
    /// monitor's end, while its VM is hibernated or until background work removes it.
    pub(super) kept: HashMap<VmId, Vec<OwnedFd>>,
    /// VMs that have ended and whose links and rules still exist.
    pub(super) leaving: HashMap<VmId, Ipv4Addr>,
    /// A link prepared for an unknown VM, and prepared links that were promised to VMs.
    pub(super) ahead: Option<PreparedLink>,
    pub(super) promised: HashMap<VmId, PreparedLink>,
}

/// A link that belongs to no VM yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct PreparedLink {
    pub(super) vm: VmId,
    pub(super) v4: Ipv4Addr,
}

impl On {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Attaches a VM, at its previous address if it has one.
    pub(super) fn attach(&self, vm: VmId, record: &VmRecord) -> Result<NewAttachment> {
        let mut inner = self.lock();
        if let Some(freed) = inner.leaving.remove(&vm) {
            self.detach(&mut inner, vm, Some(freed));
        }
        self.free_ports(&mut inner, record);
        let promised = inner.promised.remove(&vm);
        let own = v4_of(record);
        let fresh = own.is_none();
        let v4 = match (own, promised) {
            (Some(v4), _) => v4,
            (None, Some(ahead)) => ahead.v4,
            (None, None) => inner.host.take_address().map_err(failed)?,
        };
        let made = self.attach_at(&mut inner, vm, record, v4);
        if made.is_err() && fresh {
            self.detach(&mut inner, vm, Some(v4));
        }
        made.map(|made| NewAttachment { fresh, ..made })
    }

    pub(super) fn attach_at(
        &self,
        inner: &mut Inner,
        vm: VmId,
        record: &VmRecord,
        v4: Ipv4Addr,
    ) -> Result<NewAttachment> {
        let spec = spec_of(record, v4, self.everywhere)?;
        inner.hold(&spec)?;
        let mut made = match inner.kept.get(&vm) {
            // The link was prepared, or made before the VM was hibernated.
            Some(queues) => {
                let queues = dup(queues)?;
                inner.change_plain(&spec)?;
                let now = monotonic_ns();
                NewAttachment {
                    addresses: inner.host.addresses(&spec),
                    queues,
                    times_ns: [now; 4],
                    fresh: false,
                }
            }
            None => {
                let attached = inner.host.attach_again(&spec).map_err(failed)?;
                inner.kept.insert(vm, dup(&attached.tap.queues)?);
                let [begun_ns, linked_ns, ruled_ns] = attached.times_ns;
                NewAttachment {
                    addresses: attached.addresses,
                    queues: attached.tap.queues,
                    times_ns: [begun_ns, linked_ns, ruled_ns, ruled_ns],
                    fresh: false,
                }
            }
        };
        self.directory.set(asker(record, &spec, &made.addresses));
        made.times_ns[3] = monotonic_ns();
        Ok(made)
    }

    /// Detaches VMs that have just ended, because this one may publish their ports.
    pub(super) fn free_ports(&self, inner: &mut Inner, record: &VmRecord) {
        let publishes = |network: &NetworkUse| !network.ports.is_empty();
        if record.spec.network.as_ref().is_some_and(publishes) {
            for (vm, freed) in std::mem::take(&mut inner.leaving) {
                self.detach(inner, vm, Some(freed));
            }
        }
    }

    /// Detaches a VM, and releases the address `freed`.
    pub(super) fn detach(&self, inner: &mut Inner, vm: VmId, freed: Option<Ipv4Addr>) {
        self.directory.remove(vm);
        inner.held.remove(&vm);
        if let Err(error) = inner.host.detach(vm) {
            let error = causes::sentence(&error);
            warn!(%vm, error, "a VM's link or rules can't be removed");
        }
        inner.kept.remove(&vm);
        if let Some(v4) = freed {
            inner.host.free_address(v4);
        }
        self.released.notify_one();
    }

    /// See `Network::divert_ports`.
    pub(super) fn divert_ports(&self, inner: &mut Inner, vm: VmId) {
        let Some(held) = inner.held.get_mut(&vm) else {
            return;
        };
        let Some(guest) = inner.host.guest(vm) else {
            return;
        };
        let (v4, v6, ranges) = (guest.v4, guest.v6, inner.host.ranges());
        let reached = Reached::At { v4, v6, ranges };
        let sleeping = SleepingVm { vm, reached };
        self.inbound.accept(held, sleeping);
        if let Err(error) = inner.host.set_asleep(vm, true) {
            let error = causes::sentence(&error);
            warn!(%vm, error, "connections to a hibernated VM are lost: its ports can't be redirected to jiffyd");
        }
    }

    /// Prepares a link for the next VM.
    pub(super) fn prepare_link(&self) -> Result<()> {
        let mut inner = self.lock();
        if inner.ahead.is_some() {
            return Ok(());
        }
        let id = rules::new_id();
        let spec = Spec {
            network: Some(plain()),
            ..Spec::default()
        };
        let record = VmRecord::new(id.clone(), id, spec, 0);
        let vm = id_of(&record)?;
        let v4 = inner.host.take_address().map_err(failed)?;
        let attached = spec_of(&record, v4, self.everywhere)
            .and_then(|spec| inner.host.attach(&spec).map_err(failed));
        match attached {
            Ok(attached) => {
                inner.kept.insert(vm, attached.tap.queues);
                inner.ahead = Some(PreparedLink { vm, v4 });
                Ok(())
            }
            Err(error) => {
                inner.host.free_address(v4);
                Err(error)
            }
        }
    }

    pub(super) fn save(&self, inner: &mut Inner, networks: Networks) -> Result<()> {
        networks::save(&self.file, networks.clone())
            .map_err(|error| Error::io("write the networks", &self.file, &error))?;
        inner.networks = networks;
        Ok(())
    }
}

impl Inner {
    /// Holds a VM's published ports, unless they are held already. A VM without ports gets no
    /// entry, because a standby may become a VM with ports.
    pub(super) fn hold(&mut self, spec: &GuestSpec) -> Result<()> {
        if !spec.ports.is_empty()
            && let Entry::Vacant(held) = self.held.entry(spec.vm)
        {
            held.insert(Held::all(&spec.ports).map_err(port_error)?);
        }
        Ok(())
    }

    /// Extends a plain link by this VM's network, policy and ports.
    pub(super) fn change_plain(&mut self, spec: &GuestSpec) -> Result<()> {
        match is_plain(spec) {
            true => Ok(()),
            false => self.host.change(spec).map_err(failed),
        }
    }
}

/// A new attachment of a VM.
pub(super) struct NewAttachment {
    pub(super) addresses: Addresses,
    pub(super) queues: Vec<OwnedFd>,
    /// When it had its address, its link, its rules and its name.
    pub(super) times_ns: [u64; 4],
    /// The address was allocated for this attachment.
    pub(super) fresh: bool,
}

pub(super) fn dup(queues: &[OwnedFd]) -> Result<Vec<OwnedFd>> {
    let dup: std::io::Result<_> = queues.iter().map(OwnedFd::try_clone).collect();
    dup.map_err(|error| {
        Error::internal(format!(
            "The descriptors of a VM's TAP can't be duplicated: {error}."
        ))
    })
}

/// Is a prepared link all that it needs?
pub(super) fn is_plain(spec: &GuestSpec) -> bool {
    spec.network.is_none() && spec.policy.is_default() && spec.ports.is_empty()
}

pub(super) fn asker(record: &VmRecord, spec: &GuestSpec, addresses: &Addresses) -> Asker {
    Asker {
        vm: spec.vm,
        name: record.name.clone(),
        network: spec.network.clone(),
        policy: spec.policy.clone(),
        v4: addresses.v4,
        v6: addresses.v6,
    }
}
