//! `jiffy network` and `jiffy port`.

use super::Context;
use super::context::{each, show, show_json};
use crate::args::network::{Network, Port};
use crate::args::{JsonFormat, ListFormat};
use crate::client::{encoded, vm_path};
use crate::failure::{Failure, Outcome, Result, report_all};
use crate::render::Table;
use jiffy_wire::api::{self, NetworkPolicy, Vm, VmNetwork};

/// `jiffy network`
///
/// # Errors
///
/// If there is no node, it refuses, the VM has no network, or stdout can't be written.
pub async fn network(context: &Context, network: Network) -> Result<Outcome> {
    let client = context.client()?;
    match network {
        Network::Create { name } => {
            let made: api::Network = client.post(&path(&name)).await?;
            show(&format!("{}\n", made.name))?;
        }
        Network::Ls { format } => {
            let networks: Vec<api::Network> = client.get("/v1/networks").await?;
            if format == ListFormat::Json {
                show_json(&networks)?;
            } else {
                let mut table = Table::new(["NAME", "RANGES", "VMS"]);
                for network in &networks {
                    table.row([
                        network.name.clone(),
                        network.ranges.join(", "),
                        network.vms.join(", "),
                    ]);
                }
                show(&table.to_string())?;
                report_all(networks.iter().filter_map(|it| it.error.as_deref()));
                // They concern the host, and are the same for all networks.
                let first = networks.first();
                report_all(
                    first
                        .iter()
                        .flat_map(|it| it.warnings.iter().map(String::as_str)),
                );
            }
        }
        Network::Inspect { names } => {
            let mut found: Vec<api::Network> = Vec::new();
            let outcome = each(&names, async |name| {
                found.push(client.get(&path(name)).await?);
                Ok(())
            })
            .await?;
            show_json(&found)?;
            return Ok(outcome);
        }
        Network::Rm { names } => {
            return each(&names, async |name| {
                client.delete(&path(name)).await?;
                show(&format!("{name}\n"))
            })
            .await;
        }
        Network::Policy {
            allow,
            deny,
            clear,
            format,
            vm,
        } => {
            let now: Vm = client.get(&vm_path(&vm, "")).await?;
            let mut policy = network_of_vm(&now)?.policy.clone();
            if clear {
                policy = NetworkPolicy::default();
            }
            let changes = clear || !allow.is_empty() || !deny.is_empty();
            add_rules(&mut policy.allow, allow);
            add_rules(&mut policy.deny, deny);
            if changes {
                let changed: Vm = client.post_json(&vm_path(&vm, "/policy"), &policy).await?;
                policy = network_of_vm(&changed)?.policy.clone();
            }
            match format {
                Some(JsonFormat::Json) => show_json(&policy)?,
                None => show(&policy_lines(&policy))?,
            }
        }
    }
    Ok(Outcome::Done)
}

/// `jiffy port`
///
/// # Errors
///
/// If there is no node or no such VM, the VM has no network, or stdout can't be written.
pub async fn port(context: &Context, port: Port) -> Result<Outcome> {
    let client = context.client()?;
    let vm: Vm = client.get(&vm_path(&port.vm, "")).await?;
    let ports = &network_of_vm(&vm)?.ports;
    match port.format {
        Some(JsonFormat::Json) => show_json(ports)?,
        None => show(
            &ports
                .iter()
                .map(|it| format_port(it) + "\n")
                .collect::<String>(),
        )?,
    }
    Ok(Outcome::Done)
}

fn path(name: &str) -> String {
    format!("/v1/networks/{}", encoded(name))
}

fn network_of_vm(vm: &Vm) -> Result<&VmNetwork> {
    let network = vm.network.as_ref();
    network.ok_or_else(|| {
        Failure::new(format!("the VM {} has no network", vm.name))
            .hint("`jiffy doctor` says whether the host can have one")
    })
}

fn add_rules(rules: &mut Vec<String>, more: Vec<String>) {
    for rule in more {
        if !rules.contains(&rule) {
            rules.push(rule);
        }
    }
}

fn policy_lines(policy: &NetworkPolicy) -> String {
    let line = |what, rules: &[String]| -> String {
        rules
            .iter()
            .map(|rule| format!("{what} {rule}\n"))
            .collect()
    };
    line("allow", &policy.allow) + &line("deny", &policy.deny)
}

/// Formats a published port as `80/tcp -> 127.0.0.1:8080`.
fn format_port(port: &str) -> String {
    let parse = || {
        let (rest, protocol) = port.rsplit_once('/')?;
        let (host, guest) = rest.rsplit_once(':')?;
        Some(format!("{guest}/{protocol} -> {host}"))
    };
    parse().unwrap_or_else(|| port.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_rules_are_shown_one_a_line() {
        assert_eq!(
            format_port("127.0.0.1:8080:80/tcp"),
            "80/tcp -> 127.0.0.1:8080"
        );
        assert_eq!(format_port("[::]:53:53/udp"), "53/udp -> [::]:53");
        let mut policy = NetworkPolicy::default();
        add_rules(&mut policy.allow, vec!["all".into(), "all".into()]);
        add_rules(&mut policy.deny, vec!["10.0.0.0/8".into()]);
        assert_eq!(policy_lines(&policy), "allow all\ndeny 10.0.0.0/8\n");
    }
}
