//! Makes the disc that Bochs boots: GRUB, Debian's kernel, an initramfs.

use super::{IntelOptions, Program, bochs, file, output};
use crate::host_kernel::recipe;
use anyhow::{Context, Result, ensure};
use jiffy_machine::image::build::{Addition, additions_archive, initramfs, vmlinuz};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Sources of the disc's files.
pub struct Files {
    /// An unpacked Debian kernel package.
    pub package: PathBuf,
    /// An installation of Jiffy.
    pub dist: PathBuf,
}

/// Makes the disc in `folder`.
///
/// # Errors
///
/// If a file can't be read or written, GRUB would interpret a character of the kernel parameters,
/// or grub-mkrescue is not installed or fails.
pub fn build(
    folder: &Path,
    files: &Files,
    options: &IntelOptions,
    programs: &[Program],
    token: &str,
) -> Result<()> {
    let tree = folder.join("disc");
    let boot = tree.join("boot");
    std::fs::create_dir_all(boot.join("grub"))?;
    let kernel = vmlinuz(&files.package)?;
    std::fs::copy(&kernel, boot.join("vmlinuz"))
        .with_context(|| format!("copying {}", kernel.display()))?;
    std::fs::write(boot.join("grub/grub.cfg"), menu(options)?)?;

    let recipe = recipe(files.package.clone(), &files.dist, options.with_jiffy)?;
    let (base, _) = initramfs(&recipe)?;
    let script = folder.join("run");
    std::fs::write(&script, run_script(programs, token))?;
    let init = Path::new(env!("CARGO_MANIFEST_DIR")).join("bochs/init");
    let mut additions: Vec<Addition> = options.files.clone();
    additions.push(file(init, "/lab/init"));
    additions.push(file(script, "/lab/run"));
    // The kernel unpacks concatenated archives in order.
    let mut archive = std::fs::File::create(boot.join("initramfs.cpio"))?;
    archive.write_all(&base)?;
    archive.write_all(&additions_archive(&additions)?)?;
    drop(archive);

    let made = Command::new("grub-mkrescue")
        .arg("-o")
        .args([&folder.join(bochs::DISC), &tree])
        .stdin(Stdio::null())
        .output()
        .context("running grub-mkrescue: apt-get install grub-common grub-pc-bin xorriso mtools")?;
    ensure!(
        made.status.success(),
        "grub-mkrescue failed: {}",
        String::from_utf8_lossy(&made.stderr).trim_end()
    );
    std::fs::remove_dir_all(tree)?;
    Ok(())
}

/// GRUB's menu.
///
/// * `nmi_watchdog=0`: the watchdog would use the PMU, whose counters count nothing.
/// * `tsc_early_khz`, `tsc=reliable`: the time stamp counter counts instructions.
/// * `initcall_blacklist`, `cryptomgr.notests`, `mitigations=off`, `noautogroup`: as in the machine
///   in QEMU.
fn menu(options: &IntelOptions) -> Result<String> {
    let line = format!(
        "console=ttyS1,115200 panic=0 nokaslr mitigations=off cryptomgr.notests \
         random.trust_cpu=on noautogroup nmi_watchdog=0 tsc=reliable tsc_early_khz={} \
         initcall_blacklist=jent_mod_init,load_system_certificate_list,init_encrypted \
         rdinit=/lab/init {} {}",
        bochs::IPS / 1000,
        options.model.kernel_args(),
        options.kernel_args
    );
    let plain =
        |character: char| character.is_ascii_graphic() && !";|&<>{}$'\"\\#".contains(character);
    ensure!(
        options
            .kernel_args
            .chars()
            .all(|character| plain(character) || character == ' '),
        "GRUB would interpret a character of these kernel parameters: {}",
        options.kernel_args
    );
    Ok(format!(
        "set timeout=0\nterminal_output console\n\
         menuentry lab {{\n linux /boot/vmlinuz {line}\n initrd /boot/initramfs.cpio\n}}\n"
    ))
}

/// The shell script that PID 1 runs.
fn run_script(programs: &[Program], token: &str) -> String {
    let mut script = String::from("cd /tmp\n");
    let no_kvm = output::control_line_command(token, "no-kvm");
    let _ = write!(script, "[ -c /dev/kvm ] || {no_kvm}");
    script += &output::control_line_command(token, "booted");
    for program in programs {
        let words = program.env.iter().chain(&program.argv);
        let words: Vec<String> = words.map(|word| quoted(word)).collect();
        let _ = writeln!(script, "env {}", words.join(" "));
        script += &output::control_line_command(token, "ended $?");
    }
    script
}

/// Quotes a word for the shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_get_their_arguments_as_they_are() {
        let program = Program {
            argv: ["printf", "%s-%s", "it's", "$HOME \"x\" *"]
                .map(String::from)
                .into(),
            env: vec!["A=b c".into()],
        };
        let script = run_script(&[program], "t");
        let script = script.replace("[ -c /dev/kvm ]", "true");
        let output = Command::new("sh")
            .args(["-c", &script])
            .output()
            .expect("a shell");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text, "\u{1e}t booted\nit's-$HOME \"x\" *\u{1e}t ended 0\n");
    }

    #[test]
    fn parameters_that_grub_would_change_are_refused() {
        let with = |kernel_args: &str| {
            menu(&IntelOptions {
                kernel_args: kernel_args.into(),
                ..IntelOptions::default()
            })
        };
        assert!(with("noxsave quiet").unwrap().contains(" noxsave quiet\n"));
        for bad in ["a|b", "a;b", "a\nb", "$x"] {
            assert!(with(bad).is_err(), "{bad}");
        }
    }
}
