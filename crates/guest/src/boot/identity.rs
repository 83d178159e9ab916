//! Sets the host name, files in /etc with host names, and kernel parameters.

use crate::files;
use crate::program::prepare::reason;
use crate::report::Report;
use alloc::{format, string::String, vec::Vec};
use core::fmt::Write;
use jiffy_wire::guest::{GuestConfig, Root, is_host_name};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;

/// Largest /etc/hosts that is changed, bytes. Lists of blocked names have some MiB.
const LARGEST_HOSTS: usize = 16 << 20;

const HOSTS: &str = "/etc/hosts";
const MACHINE_ID: &str = "/etc/machine-id";

/// Applies the configuration at boot.
pub fn set(config: &GuestConfig, report: &mut Report) {
    apply(config, &GuestConfig::default(), report);
    if !config.interfaces.is_empty() || !config.hosts.is_empty() || !files::exists(HOSTS) {
        report.step("hosts", |_| replace_file(HOSTS, hosts(config)?.as_bytes()));
    }
    // The root's changes are in memory, so the id lasts only for this boot. A distribution's init
    // has its own rules.
    if let (Root::Overlay { upper: None, .. }, None) = (&config.root, &config.handover) {
        let mut random = [0; 16];
        let drawn = rustix::rand::getrandom(&mut random[..], GetRandomFlags::INSECURE);
        if drawn == Ok(random.len()) {
            machine_id(&hexadecimal(&random), report);
        }
    }
}

/// Applies the differences of a new configuration.
pub fn reconfigure(old: &GuestConfig, new: &GuestConfig, report: &mut Report) {
    apply(new, old, report);
    if (&new.hostname, &new.hosts) != (&old.hostname, &old.hosts) {
        report.step("hosts", |_| {
            let mut content = hosts(new)?;
            // Lines that others added stay. A file that lacks one of init's lines is the image's
            // own, and only a network replaces it.
            let present = match files::read_text(HOSTS, LARGEST_HOSTS) {
                Err(Errno::FBIG) => {
                    return Err(format!("{HOSTS} is too large; it stays as it is"));
                }
                other => other.ok(),
            };
            if let Some(present) = present {
                let ours = hosts(old)?;
                let is_ours = |line: &&str| ours.lines().any(|own| own == *line);
                let is_init = |own: &str| present.lines().any(|line| line == own);
                if (new.interfaces.is_empty() && new.hosts.is_empty()) && !ours.lines().all(is_init)
                {
                    return Ok(());
                }
                for line in present.lines().filter(|line| !is_ours(line)) {
                    let _ = writeln!(content, "{line}");
                }
            }
            replace_file(HOSTS, content.as_bytes())
        });
    }
}

/// Sets the machine id (hexadecimal, with or without dashes), if the image has a file for it.
/// Without the file, programs generate their own id.
pub fn machine_id(id: &str, report: &mut Report) {
    if !files::exists(MACHINE_ID) {
        return;
    }
    report.step("machine id", |_| {
        let mut content = id.replace('-', "");
        content.push('\n');
        match files::create(MACHINE_ID, content.as_bytes(), 0o444) {
            Err(Errno::ROFS) => bind_mount_over(MACHINE_ID, content.as_bytes(), 0o444),
            other => other,
        }
        .map_err(|error| format!("{MACHINE_ID} cannot be written: {}", reason(error)))
    });
}

/// Bind-mounts a file with this content over a file in a read-only root.
fn bind_mount_over(path: &str, content: &[u8], mode: u32) -> Result<(), Errno> {
    let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
    let file = format!("/run/{name}");
    files::create(file.as_str(), content, mode)?;
    let _ = rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH);
    rustix::mount::mount_bind(file.as_str(), path)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn apply(config: &GuestConfig, old: &GuestConfig, report: &mut Report) {
    if let Some(hostname) = &config.hostname {
        report.step("hostname", |_| {
            rustix::system::sethostname(hostname.as_bytes()).map_err(|error| {
                format!("the host name {hostname:?} was refused: {}", reason(error))
            })
        });
    }
    if !config.name_servers.is_empty()
        && (&config.name_servers, &config.search) != (&old.name_servers, &old.search)
    {
        report.step("name servers", |_| {
            let content = resolv_conf(config)?;
            replace_file("/etc/resolv.conf", content.as_bytes())
        });
    }
    let changed = || {
        let sysctls = config.sysctls.iter();
        sysctls.filter(|(key, value)| old.sysctls.get(*key) != Some(*value))
    };
    if changed().next().is_some() {
        report.step("sysctls", |_| apply_sysctls(changed()));
    }
}

/// Writes a file in /etc. A link is replaced, because its target belongs to another program. In a
/// read-only root the file is covered by a bind mount.
fn replace_file(path: &str, content: &[u8]) -> Result<(), String> {
    let is_link = rustix::fs::lstat(path)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink);
    let written = match is_link {
        true => Err(Errno::NOENT),
        false => files::create(path, content, 0o644),
    };
    let written = match written {
        Err(Errno::NOENT) => {
            // There is no /etc, or a dangling link.
            files::make_folder(c"/etc", 0o755)
                .and_then(|()| match rustix::fs::unlink(path) {
                    Err(Errno::NOENT) => Ok(()),
                    other => other,
                })
                .and_then(|()| files::create(path, content, 0o644))
        }
        other => other,
    };
    let written = match written {
        Err(Errno::ROFS) => bind_mount_over(path, content, 0o644),
        other => other,
    };
    written.map_err(|error| format!("{path} cannot be written: {}", reason(error)))
}

fn resolv_conf(config: &GuestConfig) -> Result<String, String> {
    let mut content = String::new();
    for server in &config.name_servers {
        if server.parse::<core::net::IpAddr>().is_err() {
            return Err(format!("the name server {server:?} is not an IP address"));
        }
        let _ = writeln!(content, "nameserver {server}");
    }
    if !config.search.is_empty() {
        let domains = config.search.iter().map(|domain| name(domain));
        let domains = domains.collect::<Result<Vec<_>, _>>()?;
        let _ = writeln!(content, "search {}", domains.join(" "));
    }
    Ok(content)
}

fn hosts(config: &GuestConfig) -> Result<String, String> {
    let mut content =
        String::from("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    for entry in &config.hosts {
        let address = &entry.address;
        if address.parse::<core::net::IpAddr>().is_err() {
            return Err(format!("{address:?} of a host is not an IP address"));
        }
        let names = entry.names.iter().map(|text| name(text));
        let names = names.collect::<Result<Vec<_>, _>>()?;
        if names.is_empty() {
            return Err(format!("the host {address} has no name"));
        }
        let _ = writeln!(content, "{address}\t{}", names.join(" "));
    }
    // The guest's own name has its address, if the host gave one.
    let is_named = |own: &String| config.hosts.iter().any(|entry| entry.names.contains(own));
    if let Some(own) = &config.hostname
        && !is_named(own)
    {
        let _ = writeln!(content, "127.0.1.1\t{own}");
    }
    Ok(content)
}

/// Checks the name of a host or domain.
fn name(text: &str) -> Result<&str, String> {
    match is_host_name(text) {
        true => Ok(text),
        false => Err(format!("{text:?} is not the name of a host or domain")),
    }
}

fn apply_sysctls<'a>(
    sysctls: impl Iterator<Item = (&'a String, &'a String)>,
) -> Result<(), String> {
    let failures: Vec<String> = sysctls
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

/// Path of a sysctl such as `net.ipv4.ip_forward`. As in sysctl(8), a name whose first separator is
/// a slash is separated by slashes, so that its parts may contain dots.
fn sysctl_path(key: &str) -> Option<String> {
    let slashes = key
        .find(['.', '/'])
        .is_some_and(|at| key.as_bytes()[at] == b'/');
    let separator = if slashes { '/' } else { '.' };
    let mut path = String::from("/proc/sys");
    for part in key.split(separator) {
        // In a name separated by dots, a slash stands for a dot.
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

    fn config(text: &str) -> GuestConfig {
        let whole = format!("{{\"version\":1,\"vm_id\":\"a\",{text}}}");
        serde_json::from_str(&whole).unwrap()
    }

    #[test]
    fn resolv_conf_is_written_and_bad_entries_are_refused() {
        let text = r#""name_servers":["10.0.0.1","fd00::1"],"search":["a.example","b"]"#;
        assert_eq!(
            resolv_conf(&config(text)).unwrap(),
            "nameserver 10.0.0.1\nnameserver fd00::1\nsearch a.example b\n"
        );
        for bad in [
            r#""name_servers":["10.0.0.1\nsearch evil"]"#,
            r#""search":["a b"]"#,
            r#""search":["a\nnameserver 1.1.1.1"]"#,
            r#""search":[""]"#,
        ] {
            assert!(resolv_conf(&config(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn hosts_file_names_the_guest_and_bad_entries_are_refused() {
        let named = hosts(&config(r#""hostname":"box""#)).unwrap();
        assert!(named.ends_with("127.0.1.1\tbox\n"));
        assert!(
            !hosts(&config(r#""search":[]"#))
                .unwrap()
                .contains("127.0.1.1")
        );
        let text = r#""hostname":"box","hosts":[{"address":"10.0.0.2","names":["box","box.lan"]},
                      {"address":"fd00::9","names":["db"]}]"#;
        let content = hosts(&config(text)).unwrap();
        assert!(content.ends_with("10.0.0.2\tbox box.lan\nfd00::9\tdb\n"));
        for bad in [
            r#""hosts":[{"address":"x","names":["a"]}]"#,
            r#""hosts":[{"address":"10.0.0.1","names":[]}]"#,
            r#""hosts":[{"address":"10.0.0.1","names":["a\n10.0.0.2 b"]}]"#,
        ] {
            assert!(hosts(&config(bad)).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_sysctl_name_leads_out_of_proc_sys(key in "[a-z./]{0,30}") {
            if let Some(path) = sysctl_path(&key) {
                prop_assert!(path.starts_with("/proc/sys/"));
                prop_assert!(!path.split('/').any(|part| part == ".."));
            }
        }
    }
}
