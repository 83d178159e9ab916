//! Checks which options a kernel lacks for Jiffy, or for Docker inside a guest.

use serde::Serialize;

use crate::config::{Config, Value};
use crate::image::{Format, Image};
pub use crate::requirements::Need;
use crate::requirements::REQUIREMENTS;

/// Purpose of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Ordinary guests.
    Guest,
    /// Guests in which Docker runs.
    Docker,
}

/// Why a requirement is not met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The option is not set.
    Missing,
    /// It is a module; the guests' initramfs contains no modules.
    Module,
}

/// A requirement that is not met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The option as in a configuration file: `CONFIG_VETH`. The first one, if any of several is
    /// enough.
    pub option: String,
    /// Its importance.
    pub need: Need,
    /// Whether it is missing or a module.
    pub state: State,
    /// Purpose of the option.
    pub why: &'static str,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Number of requirements that were checked.
    pub checked: usize,
    /// Requirements that are not met, the most important first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Whether a guest boots with this kernel.
    pub fn boots(&self) -> bool {
        self.findings
            .iter()
            .all(|finding| finding.need != Need::Needed)
    }
}

/// Checks a configuration.
pub fn check(config: &Config, purpose: Purpose) -> Report {
    let wanted = REQUIREMENTS
        .iter()
        .filter(|requirement| purpose == Purpose::Docker || requirement.need != Need::Docker);
    let mut report = Report {
        checked: 0,
        findings: Vec::new(),
    };
    for requirement in wanted {
        report.checked += 1;
        let values = || {
            requirement
                .options
                .iter()
                .filter_map(|option| config.get(option))
        };
        if values().any(|value| *value == Value::BuiltIn) {
            continue;
        }
        let state = if values().any(|value| *value == Value::Module) {
            State::Module
        } else {
            State::Missing
        };
        report.findings.push(Finding {
            option: format!("CONFIG_{}", requirement.options[0]),
            need: requirement.need,
            state,
            why: requirement.why,
        });
    }
    report.findings.sort_by_key(|finding| finding.need);
    report
}

/// Why an image can't be booted, with a hint; `None` if it can.
pub fn boot_problem(image: &Image) -> Option<&'static str> {
    match image.format {
        Format::Elf { pvh_entry: Some(_) } | Format::BzImage { entry_64: true, .. } => None,
        Format::Elf { pvh_entry: None } => {
            Some("it has no PVH entry note; build it with CONFIG_PVH=y, or give the bzImage")
        }
        Format::BzImage {
            entry_64: false, ..
        } => {
            Some("it has no 64-bit entry point; build it with CONFIG_X86_64=y, Linux 3.8 or newer")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration that sets every option `purpose` needs to `value`.
    fn config_for(purpose: Purpose, value: &str) -> String {
        REQUIREMENTS
            .iter()
            .filter(|requirement| purpose == Purpose::Docker || requirement.need != Need::Docker)
            .map(|requirement| format!("CONFIG_{}={value}\n", requirement.options[0]))
            .collect()
    }

    #[test]
    fn a_whole_kernel_passes() {
        let config = Config::parse(&config_for(Purpose::Docker, "y")).unwrap();
        let report = check(&config, Purpose::Docker);
        assert_eq!(report.findings, []);
        assert_eq!(report.checked, REQUIREMENTS.len());
    }

    #[test]
    fn an_ordinary_kernel_lacks_only_what_docker_needs() {
        let config = Config::parse(&config_for(Purpose::Guest, "y")).unwrap();
        assert_eq!(check(&config, Purpose::Guest).findings, []);
        let report = check(&config, Purpose::Docker);
        assert!(report.boots());
        assert!(
            report
                .findings
                .iter()
                .any(|finding| finding.option == "CONFIG_VETH")
        );
        assert!(
            report
                .findings
                .iter()
                .all(|finding| finding.need == Need::Docker)
        );
    }

    #[test]
    fn one_of_several_options_is_enough() {
        let text = config_for(Purpose::Guest, "y").replace("CONFIG_X86_MPPARSE", "CONFIG_ACPI");
        assert_eq!(
            check(&Config::parse(&text).unwrap(), Purpose::Guest).findings,
            []
        );
    }

    #[test]
    fn modules_are_findings_and_the_worst_are_listed_first() {
        let text = config_for(Purpose::Guest, "y")
            .replace("CONFIG_SMP=y\n", "")
            .replace("CONFIG_VIRTIO_MMIO=y", "CONFIG_VIRTIO_MMIO=m");
        let report = check(&Config::parse(&text).unwrap(), Purpose::Guest);
        assert!(!report.boots());
        assert_eq!(report.findings.len(), 2);
        assert_eq!(report.findings[0].option, "CONFIG_VIRTIO_MMIO");
        assert_eq!(report.findings[0].state, State::Module);
        assert_eq!(report.findings[1].option, "CONFIG_SMP");
        assert_eq!(report.findings[1].state, State::Missing);
    }

    #[test]
    fn an_image_without_an_entry_gets_a_hint() {
        let image = |format| Image {
            format,
            size: 1,
            config: Err(crate::image::NoConfig::Absent),
        };
        assert_eq!(
            boot_problem(&image(Format::Elf { pvh_entry: Some(1) })),
            None
        );
        assert!(
            boot_problem(&image(Format::Elf { pvh_entry: None }))
                .unwrap()
                .contains("CONFIG_PVH")
        );
        let old = Format::BzImage {
            protocol: (2, 10),
            entry_64: false,
        };
        assert!(boot_problem(&image(old)).unwrap().contains("64-bit"));
    }

    /// Options that Kconfig selects because options in the fragments need them.
    const IMPLIED: [&str; 1] = ["CONFIG_64BIT"];

    fn findings_of(fragments: &[&str], purpose: Purpose) -> Vec<String> {
        let config = Config::parse(&fragments.concat()).unwrap();
        let findings = check(&config, purpose)
            .findings
            .into_iter()
            .map(|finding| finding.option);
        findings
            .filter(|option| !IMPLIED.contains(&option.as_str()))
            .collect()
    }

    #[test]
    fn our_fragments_meet_all_requirements() {
        let base = include_str!("../../../kernel/base.config");
        let full = include_str!("../../../kernel/full.config");
        assert_eq!(findings_of(&[base], Purpose::Guest), [""; 0]);
        assert_eq!(findings_of(&[base, full], Purpose::Docker), [""; 0]);
    }
}
