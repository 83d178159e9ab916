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

/// Cases of Jiffy that `make bench-check` measures, too. They need the files of
/// [`crate::network::additions`].
pub fn cases(runs: u32) -> [Case; 2] {
    [(WAKE, ProxyUse::Wake), (OVERHEAD, ProxyUse::Overhead)].map(|(name, what)| Case {
        name: name.into(),
        monitor: "jiffy".into(),
        kind: Kind::Proxy(what),
        // Each boots a VM; they vary little.
        runs: runs.min(5),
        warm_up: 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::GOALS;

    #[test]
    fn each_case_of_the_proxy_has_a_goal() {
        let cases = cases(20);
        assert_ne!(cases[0].kind, cases[1].kind);
        for case in cases {
            assert!(GOALS.iter().any(|goal| goal.case == case.name));
        }
    }
}
