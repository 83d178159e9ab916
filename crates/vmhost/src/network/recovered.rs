//! Recovers addresses of running VMs that are missing in their records, because a daemon was
//! killed before it saved them or the record can't be read. They are read from the guest's
//! configuration.

use super::names::plain;
use jiffy_content::model::vm::{Spec, VmRecord};
use jiffy_net::VmId;
use jiffy_sys::regular;
use jiffy_wire::guest::{self, GuestConfig};
use jiffy_wire::vmm::{FwCfgContents, Net, NetBackend, VmmConfig};
use std::collections::HashSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

/// Largest configuration of a VMM that is read, bytes; it contains the guest's.
const MAX_CONFIG: u64 = 4 << 20;

/// Ids of VMs that have a link in this network namespace.
pub(super) fn linked() -> HashSet<String> {
    let text = fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    let names = text.lines().filter_map(|line| line.split_once(':'));
    let ids = names.filter_map(|(name, _)| VmId::of_link(name.trim()));
    ids.map(|id| id.to_string()).collect()
}

/// The addresses in the guest configuration of the VM in this folder, if it has a link: on passt,
/// all VMs have the same.
pub fn recovered(folder: &Path) -> Vec<IpAddr> {
    let told = || {
        let config = regular::read(&folder.join("vmm.json"), MAX_CONFIG).ok()?;
        let config: VmmConfig = serde_json::from_slice(&config).ok()?;
        let by_passt = |net: &Net| matches!(net.backend, NetBackend::Passt(_));
        if config.nets.iter().any(by_passt) {
            return None;
        }
        let is_guests = |name: &str| name == guest::FW_CFG_NAME;
        let file = config.fw_cfg.into_iter().find(|it| is_guests(&it.name))?;
        let FwCfgContents::Text(text) = file.contents else {
            return None;
        };
        serde_json::from_str::<GuestConfig>(&text).ok()
    };
    let interfaces = told().map(|it| it.interfaces).unwrap_or_default();
    let addresses = interfaces.iter().flat_map(|it| &it.addresses);
    addresses.filter_map(|it| it.parse().ok()).collect()
}

/// A record for a VM with a link whose own record can't be read; it has the default policy.
pub(super) fn unknown(id: &str, folder: &Path) -> VmRecord {
    let spec = Spec {
        network: Some(plain()),
        ..Spec::default()
    };
    let mut record = VmRecord::new(id.to_owned(), id.to_owned(), spec, 0);
    record.addresses = recovered(folder);
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_addresses_are_recovered_from_vmm_json() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("vmm.json");
        assert!(recovered(folder.path()).is_empty());
        for nonsense in ["", "{}", "[1]", r#"{"fw_cfg":[]}"#] {
            fs::write(&file, nonsense).unwrap();
            assert!(recovered(folder.path()).is_empty(), "{nonsense}");
        }
        let guest = r#"{"version":1,"vm_id":"a","interfaces":[{"name":"eth0","addresses":["10.118.0.2","fd00::2","x"]}]}"#;
        let config = serde_json::json!({
            "version": jiffy_wire::vmm::VERSION, "id": "a", "vcpus": 1,
            "memory": { "size_mib": 128 },
            "boot": { "kernel": "/k", "command_line": "" },
            "fw_cfg": [{ "name": guest::FW_CFG_NAME, "contents": { "text": guest } }],
        });
        let mut by_passt = config.clone();
        by_passt["nets"] =
            serde_json::json!([{"mac": "02:00:00:00:00:01", "backend": {"passt": {"fd": 5}}}]);
        fs::write(&file, by_passt.to_string()).unwrap();
        assert!(recovered(folder.path()).is_empty());
        fs::write(&file, config.to_string()).unwrap();
        assert_eq!(
            recovered(folder.path()),
            [IpAddr::from([10, 118, 0, 2]), "fd00::2".parse().unwrap()]
        );
    }
}
