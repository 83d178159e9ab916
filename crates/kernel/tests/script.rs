//! Tests the script `kernel/build`, with a source of two files and a `make` that compiles
//! nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

const MAKE: &str = r#"#!/bin/sh
for word; do
    case $word in
    O=*) out=${word#O=} ;;
    KCONFIG_ALLCONFIG=*) cp "${word#*=}" "$out/.config" ;;
    vmlinux)
        grep -q patched "$2/Makefile" || exit 1
        echo '  CC      a.o'
        mkdir -p "$out/include/config"
        echo 6.12 >"$out/include/config/kernel.release"
        echo kernel >"$out/vmlinux"
        echo map >"$out/System.map"
        ;;
    esac
done
"#;

const STRIP: &str = "#!/bin/sh\ncp \"$4\" \"$3\"\n";

const PATCH: &str = "\
--- a/Makefile
+++ b/Makefile
@@ -1 +1 @@
-all:
+all: patched
";

/// Runs one test at a time. A child that another test has just forked may have this test's script
/// open for writing, and exec would fail with ETXTBSY.
fn run_alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A folder with a checkout, a source and programs.
struct Checkout {
    root: PathBuf,
}

impl Checkout {
    fn new(above: &Path, name: &str) -> Checkout {
        let root = above.join(name);
        let kernel = root.join("kernel");
        let programs = root.join("bin");
        let source = root.join("linux");
        for folder in [&kernel.join("patches"), &programs, &source] {
            fs::create_dir_all(folder).unwrap();
        }
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel");
        for file in ["build", "cc.c"] {
            fs::copy(ours.join(file), kernel.join(file)).unwrap();
        }
        fs::write(kernel.join("base.config"), "CONFIG_64BIT=y\n").unwrap();
        fs::write(kernel.join("full.config"), "CONFIG_NET=y\n").unwrap();
        fs::write(kernel.join("patches/0001-it.patch"), PATCH).unwrap();
        fs::write(source.join("Makefile"), "all:\n").unwrap();
        let tar = Command::new("tar")
            .args(["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "-C"])
            .arg(&root)
            .arg("-cf")
            .arg(root.join("linux.tar"))
            .arg("linux")
            .status();
        assert!(tar.unwrap().success());
        for (name, text) in [("make", MAKE), ("strip", STRIP)] {
            let program = programs.join(name);
            fs::write(&program, text).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Checkout { root }
    }

    fn build(&self, arguments: &[&str], cache: &Path) -> Output {
        let path = std::env::var("PATH").unwrap();
        Command::new(self.root.join("kernel/build"))
            .args(arguments)
            .env(
                "PATH",
                format!("{}:{path}", self.root.join("bin").display()),
            )
            .env("XDG_CACHE_HOME", cache)
            .env("JIFFY_KERNEL_SOURCE", self.root.join("linux.tar"))
            .output()
            .unwrap()
    }
}

fn output_text(output: &Output) -> String {
    let text = [&output.stderr[..], &output.stdout[..]].concat();
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn a_checkout_path_may_contain_blanks() {
    let _alone = run_alone();
    let above = tempfile::tempdir().unwrap();
    let cache = above.path().join("cache");
    let plain = Checkout::new(above.path(), "project");
    let blank = Checkout::new(above.path(), "my projects");
    for flavour in ["base", "full"] {
        let hashes = [&plain, &blank].map(|checkout| {
            let output = checkout.build(&["--hash", flavour], &cache);
            assert!(output.status.success(), "{}", output_text(&output));
            assert_eq!(output.stderr, b"");
            output.stdout
        });
        assert_eq!(hashes[0], hashes[1]);
        let output = blank.build(&[flavour], &cache);
        assert!(output.status.success(), "{}", output_text(&output));
        // Another fragment changes the hash.
        fs::write(blank.root.join("kernel/base.config"), "CONFIG_SMP=y\n").unwrap();
        let other = blank.build(&["--hash", flavour], &cache);
        assert_ne!(other.stdout, hashes[1]);
        fs::write(blank.root.join("kernel/base.config"), "CONFIG_64BIT=y\n").unwrap();
    }
}

#[test]
fn a_truncated_object_count_is_ignored() {
    let _alone = run_alone();
    let above = tempfile::tempdir().unwrap();
    let cache = above.path().join("cache");
    let checkout = Checkout::new(above.path(), "project");
    let count = cache.join("jiffy/kernel/.objects-base");
    fs::create_dir_all(count.parent().unwrap()).unwrap();
    for (number, left) in ["", "0\n", "x\n"].iter().enumerate() {
        fs::write(&count, left).unwrap();
        let fragment = checkout.root.join("kernel/base.config");
        fs::write(fragment, format!("CONFIG_NR_CPUS={number}\n")).unwrap();
        let output = checkout.build(&["base"], &cache);
        assert!(
            output.status.success(),
            "{left:?}: {}",
            output_text(&output)
        );
        assert_eq!(fs::read_to_string(&count).unwrap(), "1\n");
    }
}
