//! Failures of the network, as users see them.

use jiffy_content::error::Error;
use jiffy_net::Error as NetError;
use jiffy_sys::causes;

pub(super) fn failed(error: NetError) -> Error {
    match error {
        NetError::Port(..) | NetError::PortWithoutIpv6(_) => port_error(error),
        NetError::PoolEmpty(_) => Error::no_room(format!(
            "{}.",
            causes::capitalised(causes::sentence(&error))
        )),
        _ => Error::internal(format!(
            "The VM can't be attached to the network: {}.",
            causes::sentence(&error)
        )),
    }
}

pub(super) fn port_error(error: NetError) -> Error {
    Error::conflict(format!("The port {error}.")).hint("Choose another with -p.")
}
