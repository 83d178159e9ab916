//! Host name, the files in /etc that name hosts, and kernel parameters.

use crate::files;
use crate::program::prepare::reason;
use crate::report::Report;
use alloc::{collections::BTreeMap, format, string::String, vec::Vec};
use core::fmt::Write;
use jiffy_wire::guest::GuestConfig;
use rustix::io::Errno;

/// Sets what the configuration gives; a guest without any of it costs nothing.
pub fn set(config: &GuestConfig, report: &mut Report) {
    if let Some(hostname) = &config.hostname {
        report.step("hostname", |_| {
            rustix::system::sethostname(hostname.as_bytes())
                .map_err(|error| format!("the name {hostname:?} was refused: {}", reason(error)))
        });
    }
    if !config.name_servers.is_empty() {
        report.step("name servers", |_| {
            let content = resolv_conf(&config.name_servers)?;
            replace_file("/etc/resolv.conf", content.as_bytes())
        });
    }
    if !files::exists(c"/etc/hosts") {
        report.step("hosts", |_| {
            replace_file("/etc/hosts", hosts(config.hostname.as_deref()).as_bytes())
        });
    }
    if !config.sysctls.is_empty() {
        report.step("sysctls", |_| apply_sysctls(&config.sysctls));
    }
}

/// Writes a file in /etc, in place of a dangling link if one is there.
fn replace_file(path: &str, content: &[u8]) -> Result<(), String> {
    let written = match files::create(path, content, 0o644) {
        Err(Errno::NOENT) => {
            // No such folder, or a link to where nothing is.
            files::make_folder(c"/etc", 0o755)
                .and_then(|()| match rustix::fs::unlink(path) {
                    Err(Errno::NOENT) => Ok(()),
                    other => other,
                })
                .and_then(|()| files::create(path, content, 0o644))
        }
        other => other,
    };
    written.map_err(|error| format!("{path} cannot be written: {}", reason(error)))
}

fn resolv_conf(servers: &[String]) -> Result<String, String> {
    let mut content = String::new();
    for server in servers {
        if server.parse::<core::net::IpAddr>().is_err() {
            return Err(format!("the name server {server:?} is not an IP address"));
        }
        let _ = writeln!(content, "nameserver {server}");
    }
    Ok(content)
}

fn hosts(hostname: Option<&str>) -> String {
    let mut content =
        String::from("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    if let Some(name) = hostname {
        let _ = writeln!(content, "127.0.1.1\t{name}");
    }
    content
}

fn apply_sysctls(sysctls: &BTreeMap<String, String>) -> Result<(), String> {
    let failures: Vec<String> = sysctls
        .iter()
        .filter_map(|(key, value)| {
            let Some(path) = sysctl_path(key) else {
                return Some(format!("{key:?} is not the name of a kernel parameter"));
            };
            files::write(path.as_str(), value.as_bytes())
                .err()
                .map(|error| format!("{key} = {value}: {}", reason(error)))
        })
        .collect();
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures.join("; "))
    }
}

/// `net.ipv4.ip_forward` → its file. As in sysctl(8), a name whose first
/// separator is a slash uses slashes, so that its parts may hold dots.
fn sysctl_path(key: &str) -> Option<String> {
    let slashes = key
        .find(['.', '/'])
        .is_some_and(|at| key.as_bytes()[at] == b'/');
    let separator = if slashes { '/' } else { '.' };
    let mut path = String::from("/proc/sys");
    for part in key.split(separator) {
        // With dots as separators a slash in a part stands for a dot.
        let part = if slashes {
            String::from(part)
        } else {
            part.replace('/', ".")
        };
        if part.is_empty() || part == "." || part == ".." || part.contains('\0') {
            return None;
        }
        path.push('/');
        path.push_str(&part);
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_become_paths_as_in_sysctl() {
        let path = |key| sysctl_path(key);
        assert_eq!(path("vm.swappiness").unwrap(), "/proc/sys/vm/swappiness");
        assert_eq!(
            path("net/ipv4/conf/eth0.1/forwarding").unwrap(),
            "/proc/sys/net/ipv4/conf/eth0.1/forwarding"
        );
        assert_eq!(
            path("net.ipv4.conf.eth0/1.forwarding").unwrap(),
            "/proc/sys/net/ipv4/conf/eth0.1/forwarding"
        );
        for bad in [
            "",
            ".",
            "..",
            "vm..swappiness",
            "net/../../x",
            "/etc/passwd",
            "vm.",
        ] {
            assert_eq!(path(bad), None, "{bad}");
        }
    }

    #[test]
    fn name_servers_are_addresses() {
        let both = [String::from("10.0.0.1"), String::from("fd00::1")];
        assert_eq!(
            resolv_conf(&both).unwrap(),
            "nameserver 10.0.0.1\nnameserver fd00::1\n"
        );
        assert!(resolv_conf(&[String::from("10.0.0.1\nsearch evil")]).is_err());
    }

    #[test]
    fn hosts_name_the_guest() {
        assert!(hosts(Some("box")).ends_with("127.0.1.1\tbox\n"));
        assert!(!hosts(None).contains("127.0.1.1"));
    }

    proptest! {
        #[test]
        fn no_name_leaves_the_folder(key in "[a-z./]{0,30}") {
            if let Some(path) = sysctl_path(&key) {
                prop_assert!(path.starts_with("/proc/sys/"));
                prop_assert!(!path.split('/').any(|part| part == ".."));
            }
        }
    }
}
