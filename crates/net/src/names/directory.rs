//! The VMs that may query the name server, and their names.

use crate::VmId;
use crate::identity::both_families;
use crate::policy::Policy;
use jiffy_sys::mutex::{read, write};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, RwLock};

/// The domain of VMs' names (`internal` is reserved for private use, ICANN resolution of 2024). It
/// is the guests' search domain.
pub const DOMAIN: &str = "jiffy.internal";
/// The name of the host.
const HOST: &str = "host";

/// A VM that may query the name server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asker {
    /// Its id.
    pub vm: VmId,
    /// Its name.
    pub name: String,
    /// Its network: the VM and the other VMs of this network resolve each other's names.
    pub network: Option<String>,
    /// Its policy: which names resolve for it.
    pub policy: Policy,
    /// Its IPv4 address.
    pub v4: Ipv4Addr,
    /// Its IPv6 address.
    pub v6: Option<Ipv6Addr>,
}

/// The result of a local lookup, without a resolver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// Unknown: a resolver has to be asked.
    Nothing,
    /// The name does not exist.
    Absent,
    /// The addresses of the name.
    Addresses(Vec<IpAddr>),
    /// The name of an address.
    Name(String),
}

/// All VMs that may query the name server. It can be changed while it is in use.
#[derive(Debug)]
pub struct Directory {
    gateway: (Ipv4Addr, Option<Ipv6Addr>),
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    by_vm: HashMap<VmId, Arc<Asker>>,
    by_address: HashMap<IpAddr, Arc<Asker>>,
}

impl Directory {
    /// A directory without VMs. The name `host` resolves to the gateway.
    pub fn new(gateway: Ipv4Addr, gateway6: Option<Ipv6Addr>) -> Directory {
        Directory {
            gateway: (gateway, gateway6),
            inner: RwLock::default(),
        }
    }

    /// Adds or changes a VM.
    pub fn set(&self, asker: Asker) {
        let mut inner = write(&self.inner);
        inner.remove(asker.vm);
        let asker = Arc::new(asker);
        for address in addresses(&asker) {
            inner.by_address.insert(address, asker.clone());
        }
        inner.by_vm.insert(asker.vm, asker);
    }

    /// Removes a VM.
    pub fn remove(&self, vm: VmId) {
        let mut inner = write(&self.inner);
        inner.remove(vm);
    }

    /// The VM with this id.
    pub fn known(&self, vm: VmId) -> Option<Arc<Asker>> {
        let inner = read(&self.inner);
        inner.by_vm.get(&vm).cloned()
    }

    /// The VM with this address.
    pub fn asker(&self, address: IpAddr) -> Option<Arc<Asker>> {
        let inner = read(&self.inner);
        inner.by_address.get(&address.to_canonical()).cloned()
    }

    /// Looks up a name for `asker`: its own name, and those of its network. `name` must be in lower
    /// case without a trailing dot.
    pub fn look_up(&self, asker: &Asker, name: &str) -> Known {
        let ours = name.strip_suffix(DOMAIN);
        let label = match ours {
            Some(rest) => match rest.strip_suffix('.') {
                Some(label) => label,
                None if rest.is_empty() => return Known::Addresses(Vec::new()),
                None => return Known::Nothing,
            },
            None => name,
        };
        if label == HOST {
            let (v4, v6) = self.gateway;
            return Known::Addresses(both_families(v4, v6).collect());
        }
        if let Some(address) = reverse(name) {
            return self.name_of(asker, address);
        }
        let inner = read(&self.inner);
        let named = |it: &&Arc<Asker>| it.name.eq_ignore_ascii_case(label) && sees(asker, it);
        // A VM's own name takes precedence over another VM's equal name in its network.
        let found = inner.by_vm.get(&asker.vm).filter(named);
        match found.or_else(|| inner.by_vm.values().filter(named).min_by_key(|it| it.vm)) {
            Some(found) => Known::Addresses(addresses(found).collect()),
            None if ours.is_some() || !name.contains('.') => Known::Absent,
            None => Known::Nothing,
        }
    }

    fn name_of(&self, asker: &Asker, address: IpAddr) -> Known {
        let (v4, v6) = self.gateway;
        if both_families(v4, v6).any(|own| own == address) {
            return Known::Name(format!("{HOST}.{DOMAIN}"));
        }
        let inner = read(&self.inner);
        match inner.by_address.get(&address) {
            Some(it) if sees(asker, it) => Known::Name(format!("{}.{DOMAIN}", it.name)),
            Some(_) => Known::Absent,
            None => Known::Nothing,
        }
    }
}

impl Inner {
    fn remove(&mut self, vm: VmId) {
        if let Some(old) = self.by_vm.remove(&vm) {
            for address in addresses(&old) {
                if self.by_address.get(&address).is_some_and(|it| it.vm == vm) {
                    self.by_address.remove(&address);
                }
            }
        }
    }
}

fn addresses(asker: &Asker) -> impl Iterator<Item = IpAddr> + use<> {
    both_families(asker.v4, asker.v6)
}

fn sees(asker: &Asker, other: &Asker) -> bool {
    asker.vm == other.vm || (asker.network.is_some() && asker.network == other.network)
}

/// The address of a reverse name (RFC 1035 §3.5, RFC 3596 §2.5).
fn reverse(name: &str) -> Option<IpAddr> {
    if let Some(digits) = name.strip_suffix(".in-addr.arpa") {
        let mut octets = [0; 4];
        let mut parts = digits.split('.');
        for octet in octets.iter_mut().rev() {
            *octet = parts.next()?.parse().ok()?;
        }
        return parts.next().is_none().then(|| IpAddr::from(octets));
    }
    let digits = name.strip_suffix(".ip6.arpa")?;
    let mut bits = 0u128;
    let mut count = 0;
    for digit in digits.rsplit('.') {
        let value = digit.chars().next()?.to_digit(16)?;
        if digit.len() != 1 || count == 32 {
            return None;
        }
        bits = bits << 4 | u128::from(value);
        count += 1;
    }
    (count == 32).then(|| IpAddr::V6(Ipv6Addr::from_bits(bits)))
}
