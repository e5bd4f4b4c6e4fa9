{{/* Name of the release's objects. */}}
{{- define "wideleaf.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of the agent's account. */}}
{{- define "wideleaf.account" -}}
{{- default (include "wideleaf.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/* Labels that select the pods of the DaemonSet; they never change. */}}
{{- define "wideleaf.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: wideleaf-node
{{- end -}}

{{/* Labels of every object. */}}
{{- define "wideleaf.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* The image, by digest if there is one. */}}
{{- define "wideleaf.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Not empty where an object of the Prometheus operator is made: a list of the context and the value. */}}
{{- define "wideleaf.monitoring" -}}
{{- $top := index . 0 -}}{{- $value := index . 1 -}}
{{- $has := $top.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}
{{- if or (eq $value "always") (and (eq $value "auto") $has) -}}
yes
{{- end -}}
{{- end -}}

{{/* Not empty where KubeVirt's plugin object is made and the agent serves hooks. */}}
{{- define "wideleaf.plugin" -}}
{{- if and .Values.kubevirt.plugin.enabled (.Capabilities.APIVersions.Has "plugin.kubevirt.io/v1alpha1") -}}
yes
{{- end -}}
{{- end -}}

{{/* Folder of the hooks' socket: below the one that virt-handler sees. */}}
{{- define "wideleaf.hooks" -}}
/var/run/kubevirt/plugins/wideleaf
{{- end -}}
