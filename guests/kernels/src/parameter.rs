//! Description of one parameter of a kernel: the kernels' table, the help and the errors show it.

/// One parameter of a kernel, as the help prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Key on the command line.
    pub name: &'static str,
    /// Default, in words or as a value.
    pub default: &'static str,
    /// Unit of the value.
    pub unit: &'static str,
    /// Effect of the parameter, one sentence.
    pub meaning: &'static str,
}
