//! Ids, MAC addresses and addresses of VMs, from their records.

use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_net::VmId;
use jiffy_wire::mac::Mac;
use std::net::{IpAddr, Ipv4Addr};

/// The MAC address of the VM with this id.
///
/// # Errors
///
/// If `id` is not the id of a VM.
pub fn mac_of(id: &str) -> Result<Mac> {
    Ok(id_from(id)?.mac())
}

pub(super) fn id_of(record: &VmRecord) -> Result<VmId> {
    id_from(&record.id)
}

pub(super) fn id_from(id: &str) -> Result<VmId> {
    VmId::parse(id).map_err(|error| Error::internal(format!("{error}.")))
}

/// The IPv4 address in a VM's record.
pub(super) fn v4_of(record: &VmRecord) -> Option<Ipv4Addr> {
    record.addresses.iter().find_map(|address| match address {
        IpAddr::V4(v4) => Some(*v4),
        IpAddr::V6(_) => None,
    })
}
