//! CPU profiles: what a host supports, and the one chosen for a VM.

use crate::failure::{Failure, Result};
use jiffy_wire::cpu::levels::{self, LEVELS};
use jiffy_wire::cpu::{Profile, Wanted};
use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Longest file of profiles, bytes. A profile has a few KiB.
const MAX_FILE: u64 = 4 << 20;
/// Columns of a list of features.
const WIDTH: usize = 76;

/// The value of `--cpu-profile`: a name, or a file with one or more profiles, whose common features
/// a VM gets.
///
/// # Errors
///
/// If it is no name of a profile, and no file of valid profiles of one vendor.
pub fn wanted(choice: &str) -> Result<Wanted> {
    let named = match levels::find(choice) {
        Ok(level) => return Ok(Wanted::Named(level.name.to_owned())),
        Err(why) => why,
    };
    let file = Path::new(choice);
    if !file.exists() {
        return Err(Failure::new(format!("{named}, and there is no such file"))
            .hint("`jiffy doctor --cpu --format json` prints a profile for a file"));
    }
    let bytes = read(file)?;
    let odd = |why: String| {
        Failure::new(format!("{choice} is not a file of CPU profiles: {why}"))
            .hint("`jiffy doctor --cpu --format json` prints one")
    };
    let profiles = serde_json::Deserializer::from_slice(&bytes).into_iter::<Profile>();
    let mut common: Option<Profile> = None;
    for profile in profiles {
        let profile = profile.map_err(|error| odd(error.to_string()))?;
        profile.check().map_err(odd)?;
        common = Some(match common {
            None => profile,
            Some(before) => before.common(&profile).ok_or_else(|| {
                let (one, two) = (&before.vendor, &profile.vendor);
                odd(format!(
                    "the vendors {one} and {two} have no common profile"
                ))
            })?,
        });
    }
    let common = common.ok_or_else(|| odd("it is empty".into()))?;
    Ok(Wanted::Given(Box::new(common)))
}

fn read(file: &Path) -> Result<Vec<u8>> {
    let failed = |error| Failure::io(format_args!("{} can't be read", file.display()), error);
    let mut bytes = Vec::new();
    let opened = File::open(file).map_err(failed)?;
    opened
        .take(MAX_FILE + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE {
        let file = file.display();
        return Err(Failure::new(format!(
            "{file} is larger than a file of CPU profiles may be ({} MiB)",
            MAX_FILE >> 20
        )));
    }
    Ok(bytes)
}

/// A host's CPU features and profiles as text.
pub fn table(host: &Profile) -> String {
    let mut text = String::new();
    let addresses = host.physical_address_bits();
    let _ = writeln!(text, "VENDOR      {}", host.vendor);
    let _ = writeln!(text, "ADDRESSES   {addresses} bits");
    if let Some(khz) = host.tsc_khz {
        let scaling = match host.tsc_scaling {
            true => "can be scaled for VMs from other hosts",
            false => "can't be scaled",
        };
        let _ = writeln!(text, "TSC         {khz} kHz; {scaling}");
    }
    let mut line = String::from("FEATURES   ");
    for feature in host.features() {
        if line.len() + 1 + feature.len() > WIDTH {
            let _ = writeln!(text, "{line}");
            line = " ".repeat(11);
        }
        line.push(' ');
        line.push_str(&feature);
    }
    let _ = writeln!(text, "{line}");
    for level in &LEVELS {
        let lacking = level.lacking(host);
        let verdict = match lacking.is_empty() {
            true => "yes".to_owned(),
            false => format!("no: it lacks {}", lacking.join(", ")),
        };
        let _ = writeln!(text, "{:<11} {verdict}", level.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::cpu::testing::processor;

    fn host(edx: u32) -> Profile {
        processor("AuthenticAMD", 7, &[(1, 0, [0, 0, 0, edx])])
    }

    #[test]
    fn a_profile_is_a_name_or_the_common_features_of_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fleet.json");
        let name = path.to_str().unwrap();
        let text = |edx| serde_json::to_string_pretty(&host(edx)).unwrap();
        assert_eq!(
            wanted("x86-64-v3").unwrap(),
            Wanted::Named("x86-64-v3".into())
        );
        let missing = wanted(name).unwrap_err().message;
        assert!(
            missing.contains("x86-64-v2") && missing.contains("no such file"),
            "{missing}"
        );
        std::fs::write(&path, text(1 << 25 | 1) + "\n" + &text(1 << 26 | 1)).unwrap();
        let Wanted::Given(common) = wanted(name).unwrap() else {
            panic!("it is a file");
        };
        assert_eq!(common.features(), ["fpu"]);
        let other = text(1).replace("AuthenticAMD", "GenuineIntel");
        for (contents, word) in [
            (String::new(), "empty"),
            ("{".into(), "EOF"),
            (text(1) + "x", "expected"),
            (other, "not that of one processor"),
            (
                text(1).replace("\"version\": 1", "\"version\": 2"),
                "version 2",
            ),
        ] {
            std::fs::write(&path, contents).unwrap();
            let refused = wanted(name).unwrap_err().message;
            assert!(refused.contains(word), "{refused}");
        }
    }

    #[test]
    fn the_table_of_a_host_lists_the_profiles_it_supports() {
        let shown = table(&host(1 << 25 | 1));
        assert!(shown.contains("VENDOR      AuthenticAMD\n"), "{shown}");
        assert!(shown.contains("FEATURES    fpu sse\n"), "{shown}");
        assert!(
            shown.contains("x86-64-v2   no: it lacks de, pse, "),
            "{shown}"
        );
    }
}
