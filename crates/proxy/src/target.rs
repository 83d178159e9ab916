//! Finds the VM and port of a request.
//!
//! In this order: the headers `Jiffy-Vm` and `Jiffy-Port`, a path `/vm/NAME/PORT/…`, a host
//! `PORT-NAME.DOMAIN`. NAME is a VM's name, its id, or a unique prefix of the id.

use hyper::header::{HOST, HeaderValue};
use hyper::http::uri::PathAndQuery;
use hyper::{HeaderMap, Uri};
use std::net::IpAddr;

/// The header that names a VM.
pub const VM: &str = "jiffy-vm";
/// The header that names the port.
pub const PORT: &str = "jiffy-port";
/// The header that says how many seconds a request waits for memory and vCPUs to wake its VM.
pub const WAIT: &str = "jiffy-wait";
/// The prefix of a path that names a VM.
const PREFIX: &str = "/vm/";

/// A port of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Name or id of the VM.
    pub vm: String,
    /// Its TCP port.
    pub port: u16,
    /// The path and query for the VM, without the prefix that named the VM.
    pub path: PathAndQuery,
    /// The prefix that was removed from the path, without a final slash.
    pub prefix: Option<String>,
}

/// Finds the target of a request.
///
/// # Errors
///
/// If the request names no VM and port, or a host outside the proxy's domain. The error is a
/// sentence that says what is missing.
pub fn find(uri: &Uri, headers: &HeaderMap, domain: &str) -> Result<Target, String> {
    let root = || PathAndQuery::from_static("/");
    let whole = uri.path_and_query().cloned().unwrap_or_else(root);
    let header = |name| headers.get(name).map(|value| value.to_str());
    // A request with an absolute URL is for that URL's host (RFC 9112 §3.2.2).
    let host = match uri.host() {
        None => headers.get(HOST).map(host_of).transpose()?,
        host => host,
    };
    let ours = |target| match host {
        Some(host) if !is_ours(host, domain) => Err(format!(
            "The host {host} is not this proxy's, whose domain is {domain}."
        )),
        _ => Ok(target),
    };
    if let (Some(vm), port) = (header(VM), header(PORT)) {
        let port = port.and_then(Result::ok).and_then(port_of);
        let vm = vm.ok().filter(|vm| !vm.is_empty());
        let (Some(vm), Some(port)) = (vm, port) else {
            return Err("The headers Jiffy-Vm and Jiffy-Port must name a VM and a port.".into());
        };
        return ours(Target {
            vm: vm.to_owned(),
            port,
            path: whole,
            prefix: None,
        });
    }
    if let Some(rest) = whole.as_str().strip_prefix(PREFIX) {
        return in_path(rest).and_then(ours);
    }
    let in_host = host.and_then(|host| {
        let (first, of) = host.split_at_checked(host.len().checked_sub(domain.len())?)?;
        let named = first.strip_suffix('.')?;
        let (port, vm) = named.split_once('-')?;
        let is_ours = of.eq_ignore_ascii_case(domain) && !vm.is_empty();
        is_ours.then_some((vm, port_of(port)?))
    });
    match in_host {
        Some((vm, port)) => Ok(Target {
            vm: vm.to_owned(),
            port,
            path: whole,
            prefix: None,
        }),
        None => Err(format!(
            "The request names no VM: its host must be PORT-NAME.{domain}, or its path begin with /vm/NAME/PORT/."
        )),
    }
}

/// The host in a header `Host`, without its port.
fn host_of(value: &HeaderValue) -> Result<&str, String> {
    // An invalid host must not pass as a missing one.
    let whole = value.to_str().ok().filter(|it| !it.contains('@'));
    let whole =
        whole.ok_or("The header Host is not a name or an address, with or without a port.")?;
    Ok(match whole.rsplit_once(':') {
        // An IPv6 address contains colons.
        Some((host, port)) if !port.ends_with(']') => host,
        _ => whole,
    })
}

/// May requests for this host name VMs in their path or headers? Not for foreign hosts: any site
/// could resolve its own name to this proxy (DNS rebinding), and read the answers.
fn is_ours(host: &str, domain: &str) -> bool {
    let is_below = |domain: &str| {
        let at = host.len().checked_sub(domain.len());
        let parts = at.and_then(|at| host.split_at_checked(at));
        parts.is_some_and(|(first, of)| {
            of.eq_ignore_ascii_case(domain) && (first.is_empty() || first.ends_with('.'))
        })
    };
    let literal = host.trim_start_matches('[').trim_end_matches(']');
    literal.parse::<IpAddr>().is_ok() || is_below("localhost") || is_below(domain)
}

/// Splits `NAME/PORT`, followed by nothing, a path or a query.
fn in_path(rest: &str) -> Result<Target, String> {
    let wrong = || "A path that begins with /vm/ must continue with NAME/PORT/.".to_owned();
    let (vm, rest) = rest.split_once('/').ok_or_else(wrong)?;
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (number, rest) = rest.split_at(end);
    let port = port_of(number)
        .filter(|_| !vm.is_empty() && !vm.contains('?'))
        .ok_or_else(wrong)?;
    let path = match rest.starts_with('/') {
        true => rest.to_owned(),
        false => format!("/{rest}"),
    };
    Ok(Target {
        vm: vm.to_owned(),
        port,
        path: path.parse().map_err(|_| wrong())?,
        prefix: Some(format!("{PREFIX}{vm}/{number}")),
    })
}

fn port_of(text: &str) -> Option<u16> {
    // `parse` would accept a sign.
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| is_number && *port > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(uri: &str, headers: &[(&'static str, &str)]) -> Result<(String, u16, String), String> {
        let headers = headers.iter().map(|(name, value)| {
            let name = hyper::header::HeaderName::from_static(name);
            (name, value.parse().unwrap())
        });
        let headers: HeaderMap = headers.collect();
        let found = find(&uri.parse().unwrap(), &headers, "vm.example")?;
        Ok((found.vm, found.port, found.path.to_string()))
    }

    fn is(vm: &str, port: u16, path: &str) -> Result<(String, u16, String), String> {
        Ok((vm.into(), port, path.into()))
    }

    #[test]
    fn a_host_names_a_port_and_a_vm() {
        let host = |host| of("/a?b", &[("host", host)]);
        assert_eq!(host("3000-web.vm.example"), is("web", 3000, "/a?b"));
        assert_eq!(host("80-a-b.c.VM.Example:8443"), is("a-b.c", 80, "/a?b"));
        assert_eq!(
            of("http://80-web.vm.example/x", &[("host", "other")]),
            is("web", 80, "/x")
        );
        for wrong in [
            "vm.example",
            "web.vm.example",
            "80.vm.example",
            "80-.vm.example",
            "-web.vm.example",
            "+80-web.vm.example",
            "0-web.vm.example",
            "65536-web.vm.example",
            "80-web.example",
            "80-webvm.example",
            "80-web.vm.example.org",
            "",
        ] {
            let sentence = host(wrong).unwrap_err();
            assert!(
                sentence.contains("PORT-NAME.vm.example"),
                "{wrong}: {sentence}"
            );
        }
        assert!(of("/", &[]).is_err());
    }

    #[test]
    fn a_path_prefix_names_a_vm_and_a_port_and_is_removed() {
        let host = [("host", "3000-other.vm.example")];
        assert_eq!(of("/vm/web/80/a/b?c=d", &host), is("web", 80, "/a/b?c=d"));
        assert_eq!(of("/vm/web/80/", &host), is("web", 80, "/"));
        assert_eq!(of("/vm/web/80", &host), is("web", 80, "/"));
        assert_eq!(of("/vm/web/80?c", &host), is("web", 80, "/?c"));
        assert_eq!(of("/vm/web/80//a", &host), is("web", 80, "//a"));
        for wrong in [
            "/vm/",
            "/vm/web",
            "/vm/web/",
            "/vm//80/",
            "/vm/web/x/",
            "/vm/web/0/",
            "/vm/web?a/80",
        ] {
            assert!(
                of(wrong, &host).unwrap_err().contains("NAME/PORT"),
                "{wrong}"
            );
        }
        // This path names no VM.
        assert_eq!(of("/vms/web/80", &host), is("other", 3000, "/vms/web/80"));
    }

    #[test]
    fn only_hosts_of_the_proxy_name_vms_by_path_or_headers() {
        let by_path = |host| of("/vm/web/80/", &[("host", host)]);
        let by_header = |host| of("/", &[(VM, "web"), (PORT, "80"), ("host", host)]);
        for host in [
            "vm.example:9000",
            "x.VM.example",
            "localhost:9000",
            "a.localhost",
            "127.0.0.1:9000",
            "[::1]:9000",
            "[::1]",
        ] {
            assert_eq!(by_path(host), is("web", 80, "/"), "{host}");
            assert_eq!(by_header(host), is("web", 80, "/"), "{host}");
        }
        for host in [
            "evil.example",
            "evilvm.example:9000",
            "127.0.0.1.evil.example",
        ] {
            assert!(by_path(host).unwrap_err().contains("not this proxy's"));
            assert!(by_header(host).unwrap_err().contains("not this proxy's"));
        }
        for host in ["\u{e9}vil.example", "localhost\u{e9}", "me@localhost"] {
            assert!(by_path(host).unwrap_err().contains("header Host"));
            assert!(by_header(host).unwrap_err().contains("header Host"));
        }
    }

    #[test]
    fn headers_take_precedence_over_host_and_path() {
        let both = [(VM, "web"), (PORT, "81"), ("host", "80-other.vm.example")];
        assert_eq!(of("/vm/x/1/a", &both), is("web", 81, "/vm/x/1/a"));
        assert!(of("/", &[(VM, "web"), ("host", "80-other.vm.example")]).is_err());
        assert!(of("/", &[(VM, "web"), (PORT, "x")]).is_err());
    }
}
