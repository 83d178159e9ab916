//! `kernel/measure` with a kernel of a few instructions. Needs QEMU and gcc.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Entered by PVH; jumps to the address at which `kernel/measure` expects PID 1.
const SOURCE: &str = r#"
    .code32
    .macro function name
    .globl \name
    .type \name, @function
\name:
    .endm
    .text
function entry
    mov $(stack - 0xffffffff80000000), %esp
    call outer
    call short
    mov $0x5a5a5000, %eax
    jmp *%eax
function outer
    call inner
    call inner
    ret
function inner
    mov $1000, %ecx
1:  dec %ecx
    jnz 1b
    ret
function short
    mov $100, %ecx
1:  dec %ecx
    jnz 1b
    ret
    .section .note.pvh, "a", @note
    .long 4, 4, 18
    .asciz "Xen"
    .long entry - 0xffffffff80000000
    .bss
    .balign 16384
    .skip 16384
stack:
"#;

const LAYOUT: &str = "
PHDRS { all PT_LOAD FLAGS(7); note PT_NOTE FLAGS(4); }
SECTIONS {
    . = 0xffffffff80100000;
    .text : AT(ADDR(.text) - 0xffffffff80000000) { *(.text) } :all
    .note : AT(ADDR(.note) - 0xffffffff80000000) { *(.note.pvh) } :all :note
    .bss : AT(ADDR(.bss) - 0xffffffff80000000) { *(.bss) } :all
}
";

fn build(folder: &Path) {
    fs::write(folder.join("kernel.S"), SOURCE).unwrap();
    fs::write(folder.join("layout"), LAYOUT).unwrap();
    let options = [
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none,--no-warn-rwx-segments,-T,layout",
        "-o",
        "vmlinux",
        "kernel.S",
    ];
    let built = Command::new("gcc")
        .args(options)
        .current_dir(folder)
        .status();
    assert!(built.unwrap().success());
}

fn measure(folder: &Path, arguments: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel/measure");
    Command::new(script)
        // PID 1's address must be in RAM.
        .args(["--memory", "2048"])
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap()
}

#[test]
fn a_chart_has_each_long_call_inside_its_caller() {
    let folder = tempfile::tempdir().unwrap();
    build(folder.path());
    let made = measure(
        folder.path(),
        &["--least", "500", "--chart", "boot", "vmlinux"],
    );
    let said = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(made.status.success(), "{made:?}");
    assert!(
        said.contains("boot.json and boot.svg have 3 calls"),
        "{said}"
    );
    let trace = fs::read(folder.path().join("boot.json")).unwrap();
    let trace: Value = serde_json::from_slice(&trace).unwrap();
    let calls = trace["traceEvents"].as_array().unwrap().iter();
    let calls: Vec<_> = calls
        .filter(|event| event["ph"] == "X")
        .map(|event| {
            let number = |field: &str| (event[field].as_f64().unwrap() * 1000.0).round() as u64;
            let (from, length) = (number("ts"), number("dur"));
            (event["name"].as_str().unwrap(), from, from + length)
        })
        .collect();
    let [(outer, begin, end), first, second] = calls[..] else {
        panic!("{calls:?}");
    };
    assert_eq!([outer, first.0, second.0], ["outer", "inner", "inner"]);
    assert!(
        begin < first.1 && first.2 <= second.1 && second.2 <= end,
        "{calls:?}"
    );
    // A thousand times two instructions, twice.
    assert!((4000..4020).contains(&(end - begin)), "{calls:?}");
    let svg = fs::read_to_string(folder.path().join("boot.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("data-n=\"inner\"").count(), 2);
    // The outer call's row is above that of the inner ones.
    let row = |name: &str| {
        let rect = svg.split("<rect").find(|rect| rect.contains(name)).unwrap();
        let y = rect.split_once(" y=\"").unwrap().1.split('"').next();
        y.unwrap().parse::<u32>().unwrap()
    };
    assert!(row("data-n=\"outer\"") < row("data-n=\"inner\""));
}

#[test]
fn a_chart_of_a_kernel_without_symbols_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    build(folder.path());
    let stripped = Command::new("strip")
        .arg(folder.path().join("vmlinux"))
        .status();
    assert!(stripped.unwrap().success());
    let refused = measure(folder.path(), &["--chart", "boot", "vmlinux"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success());
    assert!(
        said.contains("vmlinux has no symbols; use --chart with the vmlinux.debug"),
        "{said}"
    );
    assert!(!folder.path().join("boot.json").exists());
}

#[test]
fn a_monitor_needs_a_host_and_symbols() {
    let folder = tempfile::tempdir().unwrap();
    build(folder.path());
    let refused = |arguments: &[&str]| {
        let refused = measure(folder.path(), arguments);
        assert!(!refused.status.success());
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    let said = refused(&["--chart", "boot", "--monitor", "vmlinux", "vmlinux"]);
    assert!(said.contains("--monitor and --host: give both"), "{said}");
    let both = ["--monitor", "vmlinux", "--host", "vmlinux", "vmlinux"];
    let said = refused(&both);
    assert!(said.contains("--monitor: only with --chart"), "{said}");
    let program = folder.path().join("stripped");
    fs::copy(folder.path().join("vmlinux"), &program).unwrap();
    let stripped = Command::new("strip").arg(&program).status();
    assert!(stripped.unwrap().success());
    let said = refused(&[&["--chart", "boot", "--monitor", "stripped"], &both[2..]].concat());
    assert!(said.contains("stripped has no symbols: build it"), "{said}");
}
