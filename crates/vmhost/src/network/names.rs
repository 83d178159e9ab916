//! Names of networks.

use jiffy_content::error::Error;
use jiffy_wire::api::NetworkUse;

/// The network of VMs that request no other. VMs on it can't reach each other.
pub const DEFAULT: &str = "default";
/// The name that requests no network.
pub const NONE: &str = "none";

pub(super) fn no_network(name: &str) -> Error {
    Error::not_found(format!("There is no network {name}."))
        .hint(format!("Make it with `jiffy network create {name}`."))
}

/// The network of standbys: the default one, until a VM takes the standby over.
pub fn plain() -> NetworkUse {
    NetworkUse {
        name: Some(DEFAULT.to_owned()),
        ..NetworkUse::default()
    }
}
