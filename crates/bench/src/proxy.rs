//! Cases of the node's HTTP proxy.

use crate::plan::{Case, Kind, ProxyUse};
use std::net::{Ipv4Addr, SocketAddr};

/// From a request for a VM that sleeps to the first byte of its answer.
pub const WAKE: &str = "proxy/wake/first-byte";
/// What the proxy adds to a request.
pub const OVERHEAD: &str = "proxy/rtt/overhead";

/// Where the daemon's proxy listens.
pub const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9000);
/// Environment variable of `jiffyd` for that address.
pub const VARIABLE: &str = "JIFFY_PROXY";

/// Whether this is a case of traffic. As those without a node it is not checked.
pub fn is_traffic(case: &str) -> bool {
    case == OVERHEAD
}

/// The case that `make bench-check` measures, too. Both need the files of
/// [`crate::network::additions`].
pub fn wake_case(runs: u32) -> Case {
    // It varies little.
    case(WAKE, ProxyUse::Wake, runs.min(5), 1)
}

/// The case of traffic.
pub fn overhead_case(runs: u32) -> Case {
    // Each run boots a guest, and warms up in it.
    case(OVERHEAD, ProxyUse::Overhead, runs.min(3), 0)
}

fn case(name: &str, what: ProxyUse, runs: u32, warm_up: u32) -> Case {
    Case {
        name: name.into(),
        monitor: "jiffy".into(),
        kind: Kind::Proxy(what),
        runs,
        warm_up,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::GOALS;

    #[test]
    fn each_case_of_the_proxy_has_a_goal() {
        for case in [wake_case(20), overhead_case(20)] {
            assert!(GOALS.iter().any(|goal| goal.case == case.name));
        }
    }
}
