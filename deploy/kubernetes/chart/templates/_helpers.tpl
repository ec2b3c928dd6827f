{{- define "optstate.selector" -}}
app.kubernetes.io/name: optstate
{{- end }}

{{- define "optstate.labels" -}}
{{ include "optstate.selector" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The configuration with the pod's own places in it. */}}
{{- define "optstate.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $_ := set $config "state_dir" "/var/lib/optstate/state" }}
{{- $_ := set $config "socket" "/run/optstate/optstated.sock" }}
{{- if .Values.nvmePaths }}
{{- $directories := list }}
{{- range $index, $path := .Values.nvmePaths }}
{{- $directories = append $directories (printf "/var/lib/optstate/nvme/%d" $index) }}
{{- end }}
{{- $nvme := deepCopy (default dict $config.nvme) }}
{{- $_ := set $nvme "directories" $directories }}
{{- $_ := set $config "nvme" $nvme }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* What each probe asks: optctl, over the socket. */}}
{{- define "optstate.probe" -}}
exec:
  command: [/usr/bin/optctl, --endpoint, "unix:/run/optstate/optstated.sock", --timeout, "4", status]
timeoutSeconds: 5
{{- end }}
